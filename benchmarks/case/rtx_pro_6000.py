"""What eight RTX PRO 6000 should reach with DeepSeek-V4-Flash, by arithmetic from kernels measured on one H200.

    python -m benchmarks.case.rtx_pro_6000            the assumptions and the tables of docs/case-rtx-pro-6000.md
    python -m benchmarks.case.rtx_pro_6000 --write    put them there

Nothing here was measured on that box. Every assumption is a line of ASSUMPTIONS with a better and a worse value. A
range of the tables is what comes of all the better and of all the worse ones; the split's ratio to its rivals also of
the better ones for prefill with the worse ones for decode and the other way round, since that decides its sign.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from benchmarks.case.carry import Gpu, Measured, Ring
from benchmarks.case.loop import Reached, Step, split, unified
from splitserve.models.deepseek_v4_config import from_json
from splitserve.models.deepseek_v4_states import deepseek_v4_states
from splitserve.models.make_checkpoint import FLASH
from splitserve.spec import group_bytes

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "benchmarks/results/ops/h200_deepseek_d077556.json"
"""From before cuBLAS multiplied prompts in eight bits, as it does on sm_90 only: sm_120 goes these ways too."""
PAGE = ROOT / "docs/case-rtx-pro-6000.md"
BEGIN, END = "<!-- benchmarks.case.rtx_pro_6000 -->", "<!-- end -->"

LAYERS, HIDDEN = 43, 4096
CONCURRENCY = (1, 8, 16)
WORKLOADS = ((256, 256), (8192, 1024))
CHUNK = 2048
COLLAPSE = 2.7
"""GB/s of all writes together where posted writes under one switch stop each other, as measured by others."""


@dataclass(frozen=True)
class Assumption:
    """One number that was not measured on the box: its better and worse value, and where they come from."""

    what: str
    better: float
    worse: float
    unit: str
    source: str


ASSUMPTIONS: dict[str, Assumption] = {
    "memory": Assumption(
        "memory bandwidth that a card reaches", 1.65, 1.43, "TB/s",
        "1.79 TB/s of GDDR7 on the data sheet, 80 to 92 % of it; the H200 reached 4.25 of 4.8, 89 %",
    ),
    "bf16": Assumption(
        "bf16 products that a card reaches", 375, 250, "TFLOP/s",
        "about 500 dense on the data sheet, 50 to 75 % of it (600 W to 300 W cards); the H200 reached 683 of 989, 69 %",
    ),
    "latency": Assumption(
        "starts and waits of small kernels, to the H200's", 0.85, 1.3, "x",
        "higher clock, no tensor memory; sm_120 has programmatic dependent launch as sm_90 has",
    ),
    "clumsy": Assumption(
        "time of products at 99 KiB of shared memory a block, to 227", 1.0, 1.4, "x",
        "smaller tiles: the kernels compile for sm_120 (`splitserve kernels build`) and have not been tuned there",
    ),
    "gaps": Assumption(
        "share of a step between its kernels", 0.02, 0.10, "x",
        "CUDA graphs assumed; not measured",
    ),
    "reduce4": Assumption(
        "an all-reduce of few bytes over four cards of one node", 12, 25, "us",
        "estimate for PCIe peers: a kernel over peer memory to NCCL's protocols",
    ),
    "reduce8": Assumption(
        "the same over eight cards of both nodes", 25, 60, "us",
        "estimate; NCCL's small all-reduce is reported 1.5 to 1.9 times slower than need be on AMD hosts",
    ),
    "link": Assumption(
        "one card's writes to another of its node", 54, 45, "GB/s",
        "54 measured by others on such a box, PCIe 5 x16; 45 with other traffic",
    ),
    "across": Assumption(
        "one card's writes to one of the other node", 51, 39, "GB/s",
        "39 to 51 measured by others",
    ),
    "ring": Assumption(
        "share of a link that a ring of large all-reduces reaches", 0.85, 0.55, "x",
        "estimate for NCCL over PCIe",
    ),
    "fabric": Assumption(
        "four handoffs across at once, all together", 160, 60, "GB/s",
        "four links at 40 without switches, 83 measured by others behind some; not the 2.7 of the last table",
    ),
}  # fmt: skip
"""Where a source says "by others": reports of owners of such boxes, collected in 2026; none was repeated here."""


@dataclass(frozen=True)
class Box:
    """One set of values for all assumptions."""

    worse_prefill: bool
    worse_decode: bool

    def value(self, name: str, *, worse: bool) -> float:
        found = ASSUMPTIONS[name]
        return found.worse if worse else found.better

    def gpu(self, *, worse: bool) -> Gpu:
        return Gpu(
            self.value("memory", worse=worse) * 1e12,
            self.value("bf16", worse=worse) * 1e12,
            self.value("latency", worse=worse),
            self.value("clumsy", worse=worse),
        )

    def forward_s(self, kernels: Measured, tokens: float, ranks: int, *, worse: bool) -> float:
        """Kernels, gaps between them and two all-reduces of bf16 rows a layer; nothing of it overlaps."""
        step_s = kernels.step_s(tokens, self.gpu(worse=worse), ranks, worse=worse)
        step_s *= 1 + self.value("gaps", worse=worse)
        latency_s = self.value("reduce4" if ranks <= 4 else "reduce8", worse=worse) / 1e6
        link = self.value("link" if ranks <= 4 else "across", worse=worse)
        ring = Ring(latency_s, link * 1e9 * self.value("ring", worse=worse))
        return step_s + 2 * LAYERS * ring.seconds(2.0 * HIDDEN * tokens, ranks)

    def prefill_s(self, kernels: Measured, tokens: int, ranks: int) -> float:
        return self.forward_s(kernels, tokens, ranks, worse=self.worse_prefill)

    def step(self, kernels: Measured, ranks: int) -> Step:
        """Seconds of a decode step by batch."""
        return lambda batch: self.forward_s(kernels, batch, ranks, worse=self.worse_decode)

    def handoff_s(self, tokens: int) -> float:
        return handoff_bytes(tokens) / (self.value("fabric", worse=self.worse_prefill) * 1e9)

    def reach(self, kernels: Measured, arm: str, load: tuple[int, int], concurrency: int) -> Reached:
        num_input, num_output = load
        ranks = 8 if arm == "TP8" else 4
        step, prefill_s = self.step(kernels, ranks), self.prefill_s(kernels, num_input, ranks)
        if arm == "TP4 + TP4":
            handoff_s = self.handoff_s(num_input)
            return split(
                step, prefill_s=prefill_s, handoff_s=handoff_s, num_output=num_output, concurrency=concurrency
            )
        engines = 2 if arm == "2 x TP4" else 1
        return unified(
            step, prefill_s=prefill_s, num_output=num_output, concurrency=concurrency, engines=engines
        )


ARMS = {"TP4": 4, "TP8": 8, "2 x TP4": 8, "TP4 + TP4": 8}
"""Arm -> cards that it uses."""

BETTER, WORSE = Box(False, False), Box(True, True)
CORNERS = tuple(Box(a, b) for a, b in product((False, True), repeat=2))


def handoff_bytes(tokens: int) -> int:
    """What a prompt's state is for four ranks, each of which gets all of it: packed rows, no drafting."""
    specs = deepseek_v4_states(from_json(FLASH, Path("config.json")), dtype="bf16", kv="fp8")
    return group_bytes(specs, 0, tokens, size=4)


def read() -> Measured:
    return Measured.of(json.loads(KERNELS.read_text()), "deepseek")


def to_text(kernels: Measured) -> str:
    """The assumptions and all tables, as Markdown."""
    parts = [*_assumptions(), "", *_steps(kernels), ""]
    for load in WORKLOADS:
        parts += [*_loads(kernels, load), ""]
    parts += [*_ratios(kernels), "", *_handoffs(kernels)]
    return "\n".join(parts) + "\n"


def _assumptions() -> Iterator[str]:
    yield from _head("assumption", "better", "worse", "", "source")
    for a in ASSUMPTIONS.values():
        yield _row(a.what, f"{a.better:g}", f"{a.worse:g}", a.unit, a.source)


def _steps(kernels: Measured) -> Iterator[str]:
    yield from _head("one forward pass, ms", "TP4", "TP8", "of it all-reduces, TP4", "TP8")
    for what, tokens in (
        *((f"decode, batch {b}", b) for b in CONCURRENCY),
        ("256 tokens", 256),
        (f"{CHUNK:,} tokens", CHUNK),
        ("8,192 tokens", 8192),
    ):
        cells, shares = [], []
        for ranks in (4, 8):
            times = [box.prefill_s(kernels, tokens, ranks) for box in (BETTER, WORSE)]
            without = [_without_reduces(kernels, tokens, ranks, worse=w) for w in (False, True)]
            cells.append(_range([1000 * t for t in times]))
            shares.append(_range([100 * (1 - b / a) for a, b in zip(times, without, strict=True)], "%"))
        yield _row(what, *cells, *shares)


def _without_reduces(kernels: Measured, tokens: float, ranks: int, *, worse: bool) -> float:
    gaps = BETTER.value("gaps", worse=worse)
    return kernels.step_s(tokens, BETTER.gpu(worse=worse), ranks, worse=worse) * (1 + gaps)


def _loads(kernels: Measured, load: tuple[int, int]) -> Iterator[str]:
    yield f"{load[0]:,} tokens in, {load[1]:,} out:"
    yield ""
    yield from _head("at once", "arm", "cards", "out tok/s", "a card", "TTFT, ms", "TPOT, ms")
    for concurrency in CONCURRENCY:
        for arm, cards in ARMS.items():
            found = [box.reach(kernels, arm, load, concurrency) for box in (WORSE, BETTER)]
            rates = [load[1] * f.rate for f in found]
            yield _row(
                str(concurrency),
                arm,
                str(cards),
                _range(rates),
                _range([r / cards for r in rates]),
                _range([1000 * f.ttft_s for f in found]),
                _range([1000 * f.tpot_s for f in found]),
            )


def _ratios(kernels: Measured) -> Iterator[str]:
    yield from _head("in / out", "at once", "to 2 x TP4: tok/s", "TPOT", "to TP8: tok/s", "TPOT")
    for load, concurrency in product(WORKLOADS, CONCURRENCY):
        cells = []
        for rival in ("2 x TP4", "TP8"):
            rates, gaps = [], []
            for box in CORNERS:
                own, other = (box.reach(kernels, arm, load, concurrency) for arm in ("TP4 + TP4", rival))
                rates.append(own.rate / other.rate)
                gaps.append(own.tpot_s / other.tpot_s)
            cells += [_range(rates), _range(gaps)]
        yield _row(f"{load[0]:,} / {load[1]:,}", str(concurrency), *cells)


def _handoffs(kernels: Measured) -> Iterator[str]:
    yield from _head("prompt", "MB to all four ranks", "ms", f"ms at {COLLAPSE:g} GB/s", "prefill TP4, ms")
    for tokens, _ in WORKLOADS:
        num_bytes = handoff_bytes(tokens)
        yield _row(
            f"{tokens:,}",
            _short(num_bytes / 1e6),
            _range([1000 * box.handoff_s(tokens) for box in (BETTER, WORSE)]),
            _short(num_bytes / COLLAPSE / 1e6),
            _range([1000 * box.prefill_s(kernels, tokens, 4) for box in (BETTER, WORSE)]),
        )


def _head(*names: str) -> Iterator[str]:
    yield _row(*names)
    yield "|" + "---|" * len(names)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _range(values: Sequence[float], unit: str = "") -> str:
    """Lowest to highest, as one number where both round to the same."""
    low, high = (_short(v) for v in (min(values), max(values)))
    return f"{low}{unit}" if low == high else f"{low}-{high}{unit}"


def _short(value: float) -> str:
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def between_marks(page: str) -> str:
    return page[page.index(BEGIN) + len(BEGIN) : page.index(END)].strip() + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help=f"into {PAGE.relative_to(ROOT)}")
    args = parser.parse_args()
    text = to_text(read())
    if args.write:
        page = PAGE.read_text(encoding="utf-8")
        before, after = page[: page.index(BEGIN)], page[page.index(END) :]
        PAGE.write_text(f"{before}{BEGIN}\n\n{text}\n{after}", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
