"""What `splitserve bench` measures, and its words on the command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path

from splitserve.errors import ConfigError
from splitserve.net.keys import ENVIRONMENT, given_key
from splitserve.net.upstream import split_url
from splitserve.words import Parser, replaced

from .metrics import Slo

DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_CONCURRENCY = (1, 8, 16)
DEFAULT_NUM = (6, 24, 32)
DEFAULT_OPEN_NUM = (32,)


@dataclass(frozen=True)
class Plan:
    """What to measure. `rates` and `trace` are open loops; otherwise one closed loop for each concurrency."""

    url: str
    concurrency: tuple[int, ...] = DEFAULT_CONCURRENCY
    num: tuple[int, ...] = DEFAULT_NUM
    input_len: int = 256
    output_len: int = 256
    rates: tuple[float, ...] = ()
    trace: Path | None = None
    seed: int | None = None
    model: str = ""
    api_key: str = field(default="", repr=False)
    vocab: int = 0
    slo: Slo | None = None
    timeout_s: float = 600.0

    def check(self) -> None:
        """ConfigError names the first setting that cannot be."""
        split_url(self.url)
        for name, values in (("concurrency", self.concurrency), ("num", self.num)):
            if not values or any(v < 1 for v in values):
                raise ConfigError(
                    f"{name} is {list(values)}, needs at least one number above 0",
                    field=name,
                    fix=f"give whole numbers above 0, as --{name} 1,8,16",
                )
        loads, kind = (self.rates, "rate") if self.rates else (self.concurrency, "concurrency")
        if len(self.num) not in (1, len(loads)) and self.trace is None:
            raise ConfigError(
                f"{len(self.num)} values of num for {len(loads)} of {kind}",
                field="num",
                fix=f"give one value, or one for each {kind}",
            )
        for name in ("input_len", "output_len"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}, must be at least 1",
                    field=name,
                    fix=f"--{name.replace('_', '-')} 256 is the default",
                )
        if not all(0 < rate < inf for rate in self.rates):
            raise ConfigError(
                f"rate is {list(self.rates)}, must be above 0 and finite",
                field="rate",
                fix="requests a second, as --rate 0.5,2",
            )

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """(concurrency, number of requests) of each closed loop."""
        num = self.num * len(self.concurrency) if len(self.num) == 1 else self.num
        return list(zip(self.concurrency, num, strict=True))

    @property
    def open_shapes(self) -> list[tuple[float, int]]:
        """(requests a second, number of requests) of each Poisson loop."""
        num = self.num * len(self.rates) if len(self.num) == 1 else self.num
        return list(zip(self.rates, num, strict=True))

    @staticmethod
    def num_for(concurrency: Sequence[int]) -> tuple[int, ...]:
        """Enough requests for each concurrency to fill it twice."""
        return (
            DEFAULT_NUM
            if tuple(concurrency) == DEFAULT_CONCURRENCY
            else tuple(max(4, 2 * c) for c in concurrency)
        )


@dataclass(frozen=True)
class Outputs:
    """Where the figures go besides the table."""

    json: str = ""  # "-": stdout, and no table
    html: str = ""
    detach: bool = False
    recorded: str = ""  # directory of the run that this process is (runs.py)


def parser() -> argparse.ArgumentParser:
    """`splitserve bench [URL] ...`"""
    p = Parser(
        "splitserve bench",
        description="measure a server from outside",
        epilog="what --detach has started: bench status [ID], bench results ID (both take --json, results --html FILE),"
        " bench remove ID",
        allow_abbrev=False,
    )
    p.add_argument(
        "url", nargs="?", help=f"server or router (default: the deployment that is up, else {DEFAULT_URL})"
    )
    p.add_argument("--concurrency", type=numbers, default=DEFAULT_CONCURRENCY, help="closed loops, as 1,8,16")
    p.add_argument("--num", type=numbers, help="requests of each loop, as 6,24,32 or one number for all")
    p.add_argument("--input-len", type=int, default=256, help="prompt tokens (a trace: at most)")
    p.add_argument("--output-len", type=int, default=256, help="output tokens (a trace: at most)")
    p.add_argument(
        "--rate",
        type=rates,
        default=(),
        dest="rates",
        help="open loops: requests a second, Poisson, as 1,2,4",
    )
    p.add_argument("--trace", type=Path, help="open loop: Mooncake .jsonl or Azure .csv")
    p.add_argument("--seed", type=int, help="draw the same prompts again (a prefix cache may then answer)")
    p.add_argument("--model", default="", help="model name; default: what the server tells")
    p.add_argument("--vocab", type=int, default=0, help="vocabulary size; default: what the server tells")
    p.add_argument(
        "--api-key-file",
        default="",
        metavar="FILE",
        help=f"API key (default: {ENVIRONMENT}, else that of the deployment that is up)",
    )
    p.add_argument(
        "--api-key", default="", help="the key itself, which others here can see in lists of processes"
    )
    p.add_argument("--slo-ttft-ms", type=float, help="with --slo-tpot-ms: count goodput under these limits")
    p.add_argument("--slo-tpot-ms", type=float)
    p.add_argument("--timeout", type=float, default=600.0, dest="timeout_s", help="seconds for one request")
    p.add_argument(
        "--json",
        dest="json_path",
        nargs="?",
        const="-",
        default="",
        help="write JSON to a file, or to stdout",
    )
    p.add_argument("--html", default="", metavar="FILE", help="write one page with tables and plots")
    p.add_argument(
        "--detach", "-d", action="store_true", help="return at once; it goes on without this terminal"
    )
    p.add_argument("--recorded", default="", help=argparse.SUPPRESS)  # the other half of --detach
    return p


def no_key(_url: str) -> str:
    """The key of a server of which nothing is known."""
    return ""


def from_words(
    words: Sequence[str], *, running_url: str = "", key_of: Callable[[str], str] = no_key
) -> tuple[Plan, Outputs]:
    """What the command line asks for; `running_url` is measured where it names no other, with its key of `key_of`.

    ConfigError for words that it cannot read.
    """
    args = parser().parse_args(list(words))
    url = args.url or running_url or DEFAULT_URL
    plan = Plan(
        url=url,
        concurrency=args.concurrency,
        num=args.num or (DEFAULT_OPEN_NUM if args.rates else Plan.num_for(args.concurrency)),
        slo=slo_of(args),
        **{
            n: getattr(args, n)
            for n in ("input_len", "output_len", "rates", "trace", "seed", "model", "vocab")
        },
        api_key=given_key(args.api_key, args.api_key_file) or key_of(url),
        timeout_s=args.timeout_s,
    )
    plan.check()
    return plan, Outputs(args.json_path, args.html, args.detach, args.recorded)


def undetached(words: Sequence[str], *, url: str) -> list[str]:
    """The words of the process that --detach starts: the same measurement of `url`, JSON for stdout left out.

    Its key is left out too: it gets that in its environment, which others cannot see and nobody keeps.
    """
    args = parser().parse_args(list(words))
    own = {"--detach", "-d", *(("--json", "--json=-", "-") if args.json_path == "-" else ())}
    left = [w for w in replaced(words, {"--api-key": None, "--api-key-file": None}) if w not in own]
    return left if args.url else [*left, url]


def slo_of(args: argparse.Namespace) -> Slo | None:
    """The limits of --slo-ttft-ms and --slo-tpot-ms, or None. ConfigError for one without the other."""
    if (args.slo_ttft_ms is None) != (args.slo_tpot_ms is None):
        raise ConfigError("an SLO has two limits", field="slo", fix="give --slo-ttft-ms and --slo-tpot-ms")
    return None if args.slo_ttft_ms is None else Slo(args.slo_ttft_ms / 1000, args.slo_tpot_ms / 1000)


def numbers(text: str) -> tuple[int, ...]:
    """The numbers of "1,8,16"; argparse reports what is none."""
    return tuple(int(part) for part in text.split(","))


def rates(text: str) -> tuple[float, ...]:
    """The numbers of "0.5,2"; argparse reports what is none."""
    return tuple(float(part) for part in text.split(","))
