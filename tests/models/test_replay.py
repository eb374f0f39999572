"""Steps made for any lengths (engine/replay.py) against steps of known lengths, on a CPU, where no graph is recorded.

Pages and slots are poisoned, so that a place of the batch that nobody has, and writes all the same, is found.
"""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest
import torch

from splitserve.engine.replay import Replay, Replayed, plain, sizes_upto, suits
from splitserve.engine.sampler import draw, sample, signed_key
from splitserve.engine.step import PENDING, Chunk
from splitserve.models.deepseek_v4 import DeepseekV4
from splitserve.models.make_checkpoint import TINY, write_checkpoint
from splitserve.types import SamplingParams
from tests.models.v4_oracle import PAGE, Bench, Text, load_model, make_bench, random_text

GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DeepseekV4:
    path: Path = tmp_path_factory.mktemp("tiny")
    write_checkpoint(path, TINY)
    return load_model(path)


def texts() -> list[Text]:
    """Lengths around borders of 4 and 128, and a context that the indexer has to choose from."""
    lengths = (3, 126, 131)
    return [random_text(n + 12, seed=n, first_page=1 + 4 * i, slot=i) for i, n in enumerate(lengths)]


def chunk_of(text: Text, *, token: int | None = None) -> Chunk:
    at = text.done
    tokens = (text.tokens[at] if token is None else token,)
    return Chunk(
        str(text.slot), at, at + 1, tokens, tuple(text.pages), text.slot, sample=True, sampling=GREEDY
    )


def replay_on(bench: Bench) -> Replay:
    found = Replay(
        bench.model,
        bench.pool,
        page_tokens=PAGE,
        tp=bench.tp,
        device=torch.device("cpu"),
        max_seqs=4,
        max_len=4 * PAGE,
    )
    found.prepare()
    return found


def begun(model: DeepseekV4) -> tuple[Bench, list[Text]]:
    """A bench on which the prompts were computed."""
    bench, some = make_bench(model), texts()
    for text in some:
        bench.step([(text, len(text.tokens) - 12)])
    return bench, some


def test_lengths_known_and_unknown_give_the_same(model: DeepseekV4) -> None:
    known, some = begun(model)
    unknown, others = begun(model)
    replay = replay_on(unknown)
    for _ in range(10):
        want = known.step([(t, 1) for t in some])
        got = replay.start([chunk_of(t) for t in others], [-1] * 3, {})
        torch.testing.assert_close(got.logits, want, atol=1e-5, rtol=1e-5)
        assert got.told.tolist() == want.argmax(-1).tolist()
        for text in others:
            text.done += 1
    for kind, memory in known.pool.memory.items():
        same = unknown.pool.memory[kind]
        wrong = (memory != same).view(len(memory), -1).float().mean(1)
        assert wrong.max() < 0.1, kind  # float32 sums in another order
        untouched = (memory == 0xFF).all(1)
        assert torch.equal(untouched, (same == 0xFF).all(1))
        assert untouched.any()


def test_tokens_of_the_step_before_stay_on_the_device(model: DeepseekV4) -> None:
    one, some = begun(model)
    two, others = begun(model)
    replay, again = replay_on(one), replay_on(two)
    first = replay.start([chunk_of(t) for t in some], [-1] * 3, {})
    told = first.told.tolist()
    for text in some:
        text.done += 1
    waiting = [chunk_of(t, token=PENDING) for t in reversed(some)]
    got = replay.start(waiting, [2, 1, 0], {}).logits.clone()
    again.start([chunk_of(t) for t in others], [-1] * 3, {})
    for text in others:
        text.done += 1
    given = [chunk_of(t, token=told[t.slot]) for t in reversed(others)]
    torch.testing.assert_close(got, again.start(given, [-1] * 3, {}).logits, atol=0, rtol=0)


def test_logits_that_are_not_finite_are_told(model: DeepseekV4, monkeypatch: pytest.MonkeyPatch) -> None:
    bench, some = begun(model)
    replay = replay_on(bench)
    forward = model.forward
    monkeypatch.setattr(
        model, "forward", lambda fwd: forward(fwd).index_fill(0, torch.tensor([1]), torch.nan)
    )
    chunks = [chunk_of(t) for t in some]
    settled: list[object] = []
    pending = Replayed(
        7, chunks, replay.start(chunks, [-1] * 3, {}).told, meanwhile=lambda: None, settled=settled.append
    )
    result = pending.result()
    assert [result.sampled[c.rid].finite for c in chunks] == [True, False, True]
    assert pending.result() is result
    assert settled == [result]


def test_steps_that_overlap_are_not_counted_twice(model: DeepseekV4) -> None:
    bench, some = begun(model)
    replay = replay_on(bench)
    ends: list[float] = []

    def step(index: int) -> Replayed:
        chunks = [chunk_of(t) for t in some]
        for text in some:
            text.done += 1
        return Replayed(
            index,
            chunks,
            replay.start(chunks, [-1] * 3, {}).told,
            meanwhile=lambda: None,
            settled=lambda _: ends.append(time.monotonic()),
            since=lambda: ends[-1] if ends else 0.0,
        )

    first, second = step(0), step(1)
    time.sleep(0.05)
    begun_at = time.monotonic()
    assert first.result().seconds >= 0.05
    assert second.result().seconds <= time.monotonic() - begun_at


def test_a_draw_on_the_device_is_the_samplers() -> None:
    logits = torch.randn(12, 700, generator=torch.Generator().manual_seed(1)) * 3
    params = [SamplingParams(temperature=t, seed=s) for s in range(4) for t in (0.0, 0.7, 1.3)]
    positions = list(range(12))
    want, _ = sample(logits, params, positions, num_prompts=[0] * 12, histories=[None] * 12)
    temperatures = torch.tensor([p.temperature for p in params])
    keys = torch.tensor([signed_key(p.seed, p.choice, at) for p, at in zip(params, positions, strict=True)])
    assert draw(logits, temperatures, keys).tolist() == want


def test_what_is_replayed() -> None:
    one = Chunk("a", 4, 5, (3,), (1,), 0, sample=True, sampling=GREEDY)
    assert suits([one])
    assert not suits([])
    assert not suits([one, replace_(one, start=2, tokens=(1, 2, 3))])
    assert suits([replace_(one, marks=((4, 2),))])  # kept before the step, as at each border of a page
    assert not suits([replace_(one, marks=((5, 2),))])
    assert plain(one)
    for changed in (
        {"top_k": 5},
        {"top_p": 0.5},
        {"min_p": 0.1},
        {"logprobs": 0},
        {"frequency_penalty": 1.0},
        {"logit_bias": {3: 1.0}},
        {"min_tokens": 2},
    ):
        assert not plain(replace_(one, sampling=SamplingParams(**changed))), changed
    assert sizes_upto(1) == (1,)
    assert sizes_upto(20) == (1, 2, 4, 8, 12, 16, 20)


def replace_(chunk: Chunk, **changed: object) -> Chunk:
    return msgspec.structs.replace(chunk, **changed)
