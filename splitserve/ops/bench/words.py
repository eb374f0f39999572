"""What `splitserve bench ops` measures, and its words on the command line. Imports no torch."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from splitserve.errors import ConfigError

MODELS = ("deepseek", "llama")
TOKENS = "1,8,16,64,2048,8192"


@dataclass(frozen=True)
class Plan:
    models: tuple[str, ...]
    tokens: tuple[int, ...]
    words: tuple[str, ...] = ()  # as they were given
    json_path: Path | None = None
    table_path: Path | None = None
    bandwidth: float = 0.0  # TB/s to bound by; 0: what is measured
    commit: str = ""
    one_by_one: bool = False  # each kernel starts when the one before has ended
    jobs: int = 0  # processes that compile beforehand; 0: as many as fit

    def check(self) -> None:
        """ConfigError names the first word that cannot be."""
        unknown = [m for m in self.models if m not in MODELS]
        if unknown or not self.models:
            raise ConfigError(
                f"--models {','.join(self.models)}: not known", field="models", fix=f"of {', '.join(MODELS)}"
            )
        if not self.tokens or min(self.tokens) < 1:
            raise ConfigError(
                f"--tokens {','.join(map(str, self.tokens))}: numbers above 0 are needed",
                field="tokens",
                fix=f"for example --tokens {TOKENS}",
            )
        for path in (self.json_path, self.table_path):
            if path is not None and not path.absolute().parent.is_dir():
                raise ConfigError(f"{path}: its directory does not exist", fix=f"mkdir -p {path.parent}")
        if self.bandwidth < 0 or self.jobs < 0:
            raise ConfigError("--bandwidth and --jobs must not be below 0", fix="leave them out")


def from_words(words: Sequence[str]) -> Plan:
    """Raises ConfigError; argparse exits with code 2 for what it cannot read."""
    p = argparse.ArgumentParser("splitserve bench ops", description="time every kernel on the GPU at hand")
    p.add_argument("--models", default=",".join(MODELS), help=f"of {', '.join(MODELS)} (default: all)")
    p.add_argument("--tokens", default=TOKENS, help=f"tokens of a step; 65 and more are a prefill ({TOKENS})")
    p.add_argument("--json", type=Path, dest="json_path", metavar="FILE", help="write everything as JSON")
    p.add_argument("--table", type=Path, dest="table_path", metavar="FILE", help="write the table, too")
    p.add_argument(
        "--bandwidth", type=float, default=0.0, metavar="TB/s", help="bound by this, not by what is measured"
    )
    p.add_argument(
        "--one-by-one", action="store_true", help="without overlap of a kernel's start and the last one's end"
    )
    p.add_argument("--commit", default="", help="what to name the measured sources (default: git's HEAD)")
    p.add_argument(
        "--jobs", type=int, default=0, help="processes that compile beforehand (default: as many as fit)"
    )
    args = p.parse_args(list(words))
    plan = Plan(
        models=tuple(args.models.split(",")),
        tokens=_numbers(args.tokens),
        words=tuple(words),
        json_path=args.json_path,
        table_path=args.table_path,
        bandwidth=args.bandwidth,
        commit=args.commit,
        one_by_one=args.one_by_one,
        jobs=args.jobs,
    )
    plan.check()
    return plan


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(
            f"--tokens {text}: not a list of numbers", field="tokens", fix=f"for example --tokens {TOKENS}"
        ) from None
