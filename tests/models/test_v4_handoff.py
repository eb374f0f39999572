"""DeepSeek-V4's state from one pool into another: what the specs call live is enough, and every object of it is needed.

Rows are moved here one spec at a time by `live_rows`, from a poisoned pool's units to other units of another.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from splitserve.models.deepseek_v4 import DeepseekV4
from splitserve.models.make_checkpoint import TINY, write_checkpoint
from splitserve.spec import Growth, Kind, StateSpec
from tests.models.v4_oracle import PAGE, Bench, Text, load_model, make_bench, random_text

STEPS = 10
LENGTH = 250  # 2 tokens wait for their four, 122 for their 128


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DeepseekV4:
    path: Path = tmp_path_factory.mktemp("tiny")
    write_checkpoint(path, TINY)
    return load_model(path)


def move(src: Bench, dst: Bench, text: Text, to: Text, *, zero: str = "") -> None:
    """Hand `text` over to the units of `to`; rows of the state called `zero` arrive as zeros."""
    for spec in specs_of(src):
        source, target = (b.pool.view(spec.name, spec.layer)[:, 0] for b in (src, dst))
        for row in spec.live_rows(0, text.done, True):
            a, b = place(spec, text, row), place(spec, to, row)
            target[b] = 0 if spec.name == zero else source[a]
    to.done = text.done


def place(spec: StateSpec, text: Text, row: int) -> tuple[int, int]:
    if spec.kind is Kind.SLOT:
        return text.slot, row
    per_page = PAGE // spec.tokens_per_row
    return text.pages[row // per_page], row % per_page


def specs_of(bench: Bench) -> list[StateSpec]:
    layout = bench.pool.layout
    return [f.spec for f in (*layout.page_fields, *layout.slot_fields)]


@dataclass
class Prefilled:
    """A prompt computed in one pool. `decode` hands it over to a fresh one and goes on there."""

    src: Bench
    text: Text
    kv: str = ""

    def decode(self, steps: int, *, zero: str = "") -> torch.Tensor:
        dst, to = make_bench(self.src.model, kv=self.kv), random_text(320, slot=5, first_page=9)
        move(self.src, dst, self.text, to, zero=zero)
        return dst.run(to, [1] * steps)


def prefill(model: DeepseekV4, length: int, kv: str = "") -> Prefilled:
    src, text = make_bench(model, kv=kv), random_text(320, slot=2)
    src.run(text, [length])
    return Prefilled(src, text, kv)


def run_split(model: DeepseekV4, length: int, steps: int, *, kv: str = "") -> torch.Tensor:
    """Logits of the `steps` tokens after a prompt of `length`, computed from handed-over state."""
    return prefill(model, length, kv).decode(steps)


def run_unified(model: DeepseekV4, length: int, steps: int, *, kv: str = "") -> torch.Tensor:
    bench = make_bench(model, kv=kv)
    text = random_text(320, slot=2)
    bench.run(text, [length])
    return bench.run(text, [1] * steps)


@pytest.fixture(scope="module")
def prompt(model: DeepseekV4) -> Prefilled:
    return prefill(model, LENGTH)


@pytest.fixture(scope="module")
def unified(model: DeepseekV4) -> torch.Tensor:
    return run_unified(model, LENGTH, STEPS)


@pytest.mark.parametrize("length", [1, 3, 63, 127, 128, 129, 194, 256])
def test_split_equals_unified(model: DeepseekV4, length: int) -> None:
    """The prompt's length at every residue of 4 and around multiples of 128."""
    assert torch.equal(run_split(model, length, 4), run_unified(model, length, 4))


def check_any(model: DeepseekV4, length: int, cuts: set[int]) -> None:
    """A prompt computed in chunks and handed over, against one that is computed whole and stays."""
    src, text = make_bench(model), random_text(320, slot=2)
    borders = [0, *sorted(c for c in cuts if c < length), length]
    src.run(text, [b - a for a, b in pairwise(borders)])
    found = Prefilled(src, text).decode(3)
    torch.testing.assert_close(found, run_unified(model, length, 3), atol=1e-4, rtol=0)


@settings(max_examples=2, deadline=None)
@given(length=st.integers(1, 310), cuts=st.sets(st.integers(1, 309), max_size=4))
def test_split_equals_unified_at_any_length(model: DeepseekV4, length: int, cuts: set[int]) -> None:
    check_any(model, length, cuts)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(length=st.integers(1, 310), cuts=st.sets(st.integers(1, 309), max_size=4))
def test_split_equals_unified_at_many_lengths(model: DeepseekV4, length: int, cuts: set[int]) -> None:
    check_any(model, length, cuts)


def test_split_equals_unified_past_the_next_border(prompt: Prefilled, unified: torch.Tensor) -> None:
    assert torch.equal(prompt.decode(STEPS), unified)


@pytest.mark.parametrize("length", [129, 255])
def test_packed_rows_split_as_they_do_unified(model: DeepseekV4, length: int) -> None:
    assert torch.equal(run_split(model, length, 5, kv="fp8"), run_unified(model, length, 5, kv="fp8"))


@pytest.mark.parametrize(
    "state",
    [
        "window",
        "c4",
        "index",
        "c128",
        "c4_carry",
        "c4_pending",
        "index_carry",
        "index_pending",
        "c128_pending",
    ],
)
def test_every_state_is_needed(prompt: Prefilled, unified: torch.Tensor, state: str) -> None:
    """A lost state shows within a few steps from a length that divides by neither 4 nor 128."""
    lost = prompt.decode(STEPS, zero=state) - unified
    assert lost.isfinite().all()
    assert lost.abs().amax() > 1e-2


def test_nothing_waits_at_a_multiple_of_128() -> None:
    from splitserve.models.deepseek_v4_config import from_json
    from splitserve.models.deepseek_v4_states import deepseek_v4_states

    specs = deepseek_v4_states(from_json(TINY, Path("config.json")), dtype="f32")
    tails = [s for s in specs if s.growth is Growth.TAIL]
    assert tails
    assert {len(s.live_rows(0, 256, True)) for s in tails} == {0}
    assert {len(s.live_rows(0, 257, True)) for s in tails} == {1}
    assert {len(s.live_rows(0, 255, False)) for s in tails} == {0}
