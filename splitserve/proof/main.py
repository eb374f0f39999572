"""`splitserve verify`: ask the split pair and one unified engine the same, judge, plant faults, print the table.

    for each question:  flush all caches ─▶ poison decode's free rows ─▶ ask router ─▶ ask unified ─▶ records ─▶ judge
    for each fault:     plant it at prefill ─▶ one question ─▶ the judge must object

Exit code 0: every question proves it (and every planted fault was caught). 1: not. 2: nothing could be asked.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from splitserve.errors import ConfigError
from splitserve.net.client import Client
from splitserve.proof.cases import Question, questions
from splitserve.proof.judge import Case, Crossing, judge
from splitserve.proof.sides import Side
from splitserve.proof.stage import stage, unified_engine
from splitserve.spec import StateSpec, group_bytes
from splitserve.tables import columns
from splitserve.words import Parser

if TYPE_CHECKING:
    from rich.console import Console

EQUAL_TP_BOUND = 0.0
UNEQUAL_TP_BOUND = 1e-3
"""Nats of logprob in f32: sums over ranks run in another order. Measured gaps on the demo model are below 1e-4."""


@dataclass(frozen=True)
class Planted:
    fault: str
    caught: bool
    by: str


def run(words: Sequence[str]) -> int:
    """The command: `words` are those after `splitserve verify`."""
    args = _parser().parse_args(list(words))
    faults = _faults(args.plant)
    from rich.console import Console

    console = Console(stderr=args.json)
    cases, planted = asyncio.run(Proof(args.file, faults, quick=args.quick, console=console).run())
    if args.json:
        print(json.dumps(_to_dict(cases, planted)))
    else:
        _print(console, cases, planted)
    good = all(not c.findings for c in cases) and all(p.caught for p in planted)
    return 0 if good and cases else 1


def _parser() -> argparse.ArgumentParser:
    from splitserve.transfer.faults import FAULTS

    parser = Parser(
        prog="splitserve verify",
        description="prove that a split answer is the unified answer and that its state really crossed",
    )
    parser.add_argument(
        "file", nargs="?", default="", help="deployment file; default: the one that is running"
    )
    parser.add_argument(
        "--plant", default="", metavar="FAULT", help=f"also plant faults: all, or some of {', '.join(FAULTS)}"
    )
    parser.add_argument("--quick", action="store_true", help="three questions only")
    parser.add_argument("--json", action="store_true", help="print one JSON object to stdout")
    return parser


def _faults(words: str) -> list[str]:
    from splitserve.transfer.faults import FAULTS

    names = list(FAULTS) if words == "all" else [w for w in words.split(",") if w]
    for name in names:
        if name not in FAULTS:
            raise ConfigError(f"no fault {name!r}", field="plant", fix=f"all, or some of {', '.join(FAULTS)}")
    return names


class Proof:
    """One run of `verify`."""

    def __init__(self, file: str, faults: list[str], *, quick: bool, console: Console) -> None:
        self._file = file
        self._faults = faults
        self._quick = quick
        self._console = console
        self._rooms: set[int] = set()

    async def run(self) -> tuple[list[Case], list[Planted]]:
        async with AsyncExitStack() as closing:
            client = await closing.enter_async_context(Client())
            doors = await stage(self._file, self._say, closing)
            self._router = Side(client, doors.router.url, "the router", api_key=doors.router.key)
            self._prefill = Side(client, doors.prefill.url, "prefill", api_key=doors.prefill.key)
            self._decode = Side(client, doors.decode.url, "decode", api_key=doors.decode.key)
            facts = {s.name: await s.facts() for s in (self._prefill, self._decode)}
            self._expect_faults_allowed(facts["prefill"])
            self._specs, self._tp = _specs(facts["decode"]), int(facts["decode"]["tp"])
            equal = facts["prefill"]["tp"] == self._tp
            tp = self._tp if equal else 1
            unified = await unified_engine(
                facts["prefill"], self._say, closing, tp=tp, key_file=doors.engine_key_file
            )
            self._unified = Side(client, unified, "unified", api_key=doors.decode.key)
            self._bound = EQUAL_TP_BOUND if equal else UNEQUAL_TP_BOUND
            await self._decode.operate("digests", all=True)
            closing.push_async_callback(self._decode.operate, "digests", all=False)
            return await self._questions(facts["prefill"])

    async def _questions(self, facts: dict[str, Any]) -> tuple[list[Case], list[Planted]]:
        ids = await self._decode.text_ids()
        asked = questions(
            ids, page_tokens=facts["page_tokens"], step_tokens=facts["step_tokens"], quick=self._quick
        )
        cases = []
        for question in asked:
            self._say(f"{question.name}: {len(question.tokens)} tokens")
            cases.append(await self._case(question))
        planted = []
        for fault in self._faults:
            planted.append(await self._plant(fault, asked))
        for side in (self._prefill, self._decode):
            await side.operate("check")
        return cases, planted

    async def _case(self, question: Question) -> Case:
        """One question to both sides, and what was recorded of its handoff."""
        for side in (self._prefill, self._decode, self._unified):
            await side.operate("flush_cache")
        poisoned = int((await self._decode.operate("poison"))["poisoned_pages"])
        await self._new_records()
        before = await self._decode.counters()
        split, unified = await self._router.ask(question), await self._unified.ask(question)
        recomputed = int((await self._decode.counters())["recomputations"] - before["recomputations"])
        crossing = await self._crossing(question)
        if crossing is not None:
            crossing = replace(crossing, recomputations=recomputed, poisoned_pages=poisoned)
        case = Case(question.name, len(question.tokens), question.temperature == 0, split, unified, crossing)
        findings = judge(case, bound=self._bound)
        if recomputed and crossing is None:
            findings.append(f"{recomputed} recomputation(s): the answer came without the handoff")
        return replace(case, findings=tuple(findings))

    async def _plant(self, fault: str, asked: list[Question]) -> Planted:
        """Break one handoff on purpose. Caught means that the judge has something to say about it."""
        self._say(f"planting {fault}")
        await self._prefill.operate("plant", fault=fault, times=1)
        longest = max(asked, key=lambda q: len(q.tokens) if len(q.tokens) <= 300 else 0)
        case = await self._case(longest)
        await self._prefill.operate("plant", fault=fault, times=0)
        return Planted(fault, bool(case.findings), "; ".join(case.findings))

    async def _crossing(self, question: Question) -> Crossing | None:
        """The record of the newest handoff, both sides' views joined by room."""
        sent, received = await self._new_records()
        if not received:
            return None
        if not received[-1]["ok"]:
            return Crossing(failure=received[-1]["error"] or "it failed")
        here = received[-1]
        there = next((r for r in sent if r["room"] == here["room"]), {})
        digests = here.get("digests", [])
        chunks = there.get("chunks", [])
        return Crossing(
            num_bytes=int(here["bytes"]),
            expected_bytes=group_bytes(self._specs, here["start"], len(question.tokens), size=self._tp),
            num_pages=int(there.get("pages", 0)),
            num_descriptors=int(there.get("descriptors", 0)),
            lane=", ".join(there.get("lanes", [])),
            seconds=sum(c["moving"] for c in chunks),  # not the computing between two chunks
            sent_digest=_joined(d["prefill"] for d in digests),
            received_digest=_joined(d["decode"] for d in digests),
            digest_checked=bool(digests),
        )

    async def _new_records(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Handoffs recorded since the last call: (sent by prefill, received by decode)."""
        sent = (await self._prefill.handoffs())["sent"]
        received = (await self._decode.handoffs())["received"]
        new = [r for r in received if r["room"] not in self._rooms]
        self._rooms.update(r["room"] for r in received)
        return sent, new

    def _expect_faults_allowed(self, facts: dict[str, Any]) -> None:
        if self._faults and not facts.get("allow_faults"):
            raise ConfigError(
                "this deployment does not allow planted faults",
                fix="set allow_faults = true in its [engine], or stop it: verify then brings up one of its own",
            )

    def _say(self, text: str) -> None:
        self._console.print(f"[dim]{text}[/dim]", highlight=False)


def _specs(facts: dict[str, Any]) -> list[StateSpec]:
    """What the model keeps, from its own files: not from anything that the transfer has computed."""
    from splitserve.models import registry  # numpy comes in here
    from splitserve.models.read import read_config
    from splitserve.weights.locate import locate

    cfg = read_config(locate(Path(facts["model_path"])))
    drafts = facts["speculative"] != "none"
    return registry.states(cfg, dtype=facts["dtype"], kv=facts["kv_dtype"], draft=drafts)


def _joined(parts: Any) -> str:
    return " ".join(parts)


def _to_dict(cases: list[Case], planted: list[Planted]) -> dict[str, Any]:
    good = all(not c.findings for c in cases) and all(p.caught for p in planted)
    return {"ok": good, "cases": [asdict(c) for c in cases], "planted": [asdict(p) for p in planted]}


def _exact(case: Case) -> bool:
    """Both sides gave the same tokens with the same logprobs, to the bit."""
    return bool(case.split.tokens) and (case.split.tokens, case.split.logprobs) == (
        case.unified.tokens,
        case.unified.logprobs,
    )


def _answer(case: Case) -> str:
    if case.findings:
        return "differs"
    return "bit-equal" if _exact(case) else "within bound"


def _table(cases: Sequence[Case]) -> list[str]:
    """A row a question, then the lanes that carried them: nothing is cut, and 80 columns hold it."""
    head = ("question", "tokens", "answer", "MB", "pages", "copies", "GB/s", "digest")
    rows = []
    for case in cases:
        c = case.crossing or Crossing()
        rows.append(
            (
                case.name,
                str(case.num_prompt),
                _answer(case),
                f"{c.num_bytes / 1e6:.2f}",
                str(c.num_pages),
                str(c.num_descriptors),
                f"{c.gb_s:.2f}",
                c.received_digest[:6] + ("" if c.sent_digest == c.received_digest else "≠"),
            )
        )
    lanes = sorted({case.crossing.lane for case in cases if case.crossing and case.crossing.lane})
    return [*columns(head, rows, numbers=(1, 3, 4, 5, 6)), *([f"lane: {'; '.join(lanes)}"] if lanes else [])]


def _print(console: Console, cases: list[Case], planted: list[Planted]) -> None:
    lines = ["split against unified", "", *_table(cases), ""]
    console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)
    for case in cases:
        for finding in case.findings:
            console.print(f"[red]{case.name}: {finding}[/red]", highlight=False)
    for p in planted:
        word = "[green]caught[/green]" if p.caught else "[red]NOT CAUGHT[/red]"
        console.print(f"planted {p.fault}: {word}  {p.by.split('; ')[0]}", highlight=False)
    recomputed = sum(c.crossing.recomputations for c in cases if c.crossing)
    good = sum(not c.findings for c in cases)
    console.print(
        f"{good} of {len(cases)} questions proven, {sum(map(_exact, cases))} of them bit-equal in tokens and logprobs; "
        f"recomputations {recomputed}",
        highlight=False,
    )
    if planted:
        console.print(
            f"{sum(p.caught for p in planted)} of {len(planted)} planted faults caught", highlight=False
        )


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
