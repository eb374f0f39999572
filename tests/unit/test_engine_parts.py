"""The small deciders of the engine: memory sizing, a step as tensors, cpus of ranks, ratings of prompts."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from splitserve.config import EngineConfig
from splitserve.dist.group import SoloGroup
from splitserve.engine import batch, memory
from splitserve.engine.constraint import Constraints
from splitserve.engine.runner import Runner, rate
from splitserve.engine.step import PENDING, Chunk, Step
from splitserve.errors import CapacityError
from splitserve.numa import share_of
from splitserve.spec import Growth, StateSpec, lay_out
from splitserve.text.grammar import Vocabulary
from splitserve.types import SamplingParams

SPECS = [StateSpec("kv", layer, Growth.PAGED, 64, pieces=2, encoding="f32") for layer in range(3)]
LAYOUT = lay_out(SPECS, page_tokens=16)
CONFIG = EngineConfig(page_tokens=16, max_seqs=4)


def test_pages_fill_the_memory_given_but_no_more_than_requests_could_use() -> None:
    few = memory.size(replace(CONFIG, memory_mb=1), LAYOUT, model_max_len=10**6, free_bytes=10**9)
    assert few.num_pages == 10**6 // LAYOUT.page_bytes
    assert few.max_len == few.num_pages * 16
    enough = memory.size(replace(CONFIG, memory_mb=900), LAYOUT, model_max_len=160, free_bytes=10**9)
    assert enough.num_pages == 4 * 160 // 16
    assert enough.max_len == 160


@pytest.mark.parametrize(
    ("changes", "free", "says"),
    [
        ({}, 100, f"{LAYOUT.page_bytes:,} bytes"),
        ({"num_pages": 10**6}, 10**6, "free memory 1,000,000"),
        ({"memory_mb": 1, "max_len": 5000}, 10**9, "does not fit in"),
        ({"max_len": 10**7}, 10**9, "longer than the model's"),
    ],
)
def test_what_cannot_fit_is_refused_with_the_sum(changes, free, says) -> None:
    with pytest.raises(CapacityError) as e:
        memory.size(replace(CONFIG, **changes), LAYOUT, model_max_len=10**6, free_bytes=free)
    assert says in e.value.message


@given(cpus=st.lists(st.integers(0, 63), unique=True, max_size=12), size=st.integers(1, 8))
def test_ranks_share_cpus_without_overlap_when_there_are_enough(cpus, size) -> None:
    shares = [share_of(tuple(cpus), r, size) for r in range(size)]
    if len(cpus) >= size:
        assert sorted(c for s in shares for c in s) == sorted(cpus)
        assert all(shares)
    else:
        assert all(s == tuple(cpus) for s in shares)


def chunk(rid: str, start: int, tokens: tuple[int, ...], pages: tuple[int, ...], **more) -> Chunk:
    return Chunk(rid, start, start + len(tokens), tokens, pages, **more)


def test_a_step_as_tensors_puts_each_token_where_its_page_says() -> None:
    step = Step(
        1,
        (
            chunk("long", 14, (7, 8, 9, 10), (5, 2), sample=True),
            chunk("one", 33, (PENDING,), (1, 3, 4), sample=True),
        ),
    )
    chunks = batch.in_forward_order(step)
    assert [c.rid for c in chunks] == ["one", "long"]
    fwd = batch.build(
        chunks,
        {"one": 42},
        page_tokens=16,
        states=None,
        tp=SoloGroup(),
        device=torch.device("cpu"),
        between_layers=lambda: None,
    )
    assert fwd.tokens.tolist() == [42, 7, 8, 9, 10]
    assert fwd.positions.tolist() == [33, 14, 15, 16, 17]
    assert fwd.write_page.tolist() == [4, 5, 5, 2, 2]
    assert fwd.write_row.tolist() == [1, 14, 15, 0, 1]
    assert fwd.logit_rows.tolist() == [0, 4]
    assert (fwd.num_decode, fwd.q_lens, fwd.kv_lens) == (1, (1, 4), (34, 18))


def no_vocabulary() -> Vocabulary:
    raise AssertionError("no request here has a grammar")


class Echo:
    """A model whose logits say, for each row, that token + 1 comes next."""

    def forward(self, fwd) -> torch.Tensor:
        logits = torch.zeros(len(fwd.logit_rows), 64)
        logits[torch.arange(len(logits)), fwd.tokens[fwd.logit_rows] + 1] = 5.0
        return logits


def test_prompt_logprobs_rate_the_tokens_that_came_next() -> None:
    runner = Runner(
        Echo(),
        SimpleNamespace(),
        page_tokens=16,
        tp=SoloGroup(),
        device=torch.device("cpu"),
        between_layers=lambda: None,
        constraints=Constraints(no_vocabulary),
    )
    greedy = SamplingParams(temperature=0, prompt_logprobs=1)
    asked = chunk(
        "a", 0, (10, 11, 20), (0,), sample=True, sampling=greedy, prompt_logprobs=1, prompt_next=(11, 20)
    )
    other = chunk("b", 3, (30,), (1,), sample=True, sampling=SamplingParams(temperature=0))
    result = runner.launch(Step(1, (asked, other))).result()
    assert result.sampled["a"].tokens == (21,)
    assert result.sampled["b"].tokens == (31,)
    hit, miss = result.sampled["a"].prompt_logprobs
    assert hit.top_ids == (11,)
    assert hit.logprob == pytest.approx(hit.top_logprobs[0])
    assert miss.top_ids == (12,)
    assert miss.logprob == pytest.approx(hit.logprob - 5.0, abs=1e-5)


def test_a_row_with_nan_is_marked_and_does_not_taint_its_neighbour() -> None:
    class Poisoned(Echo):
        def forward(self, fwd) -> torch.Tensor:
            logits = super().forward(fwd)
            logits[0, 3] = math.nan
            return logits

    runner = Runner(
        Poisoned(),
        SimpleNamespace(),
        page_tokens=16,
        tp=SoloGroup(),
        device=torch.device("cpu"),
        between_layers=lambda: None,
        constraints=Constraints(no_vocabulary),
    )
    greedy = SamplingParams(temperature=0)
    chunks = tuple(chunk(r, 0, (10,), (i,), sample=True, sampling=greedy) for i, r in enumerate("ab"))
    sampled = runner.launch(Step(1, chunks)).result().sampled
    assert not sampled["a"].finite
    assert sampled["b"].finite
    assert sampled["b"].tokens == (11,)


def test_rate_is_log_softmax() -> None:
    logits = torch.randn(3, 17)
    want = torch.log_softmax(logits, -1)
    got = rate(logits, (4, 0, 16), 2)
    assert [g.logprob for g in got] == pytest.approx(want[[0, 1, 2], [4, 0, 16]].tolist(), abs=1e-6)
    assert all(g.top_logprobs[0] >= g.top_logprobs[1] for g in got)
