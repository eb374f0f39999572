"""DeepSeek-V4's logits against transformers', float32, TINY: whole, in any chunks, token by token, in mixed batches."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from splitserve.models.deepseek_v4 import DeepseekV4
from splitserve.models.make_checkpoint import TINY, write_checkpoint
from tests.models.v4_oracle import Text, load_model, make_bench, random_text, transformers_model

ATOL = 1e-4
LENGTH = 300  # two HCA entries, 75 CSA entries of which 8 are read, 18 windows


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    write_checkpoint(path, TINY, shard_bytes=1 << 20)
    return path


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> DeepseekV4:
    return load_model(checkpoint)


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> Any:
    return transformers_model(checkpoint)


@pytest.fixture(scope="module")
def expected(oracle: Any) -> torch.Tensor:
    return logits_of(oracle, random_text(LENGTH))


def logits_of(oracle: Any, text: Text) -> torch.Tensor:
    with torch.no_grad():
        return oracle(torch.tensor([text.tokens]), use_cache=False).logits[0]


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert expected.std() > 0.3, "a flat model proves nothing"
    torch.testing.assert_close(actual, expected, atol=ATOL, rtol=0)


def test_whole(model: DeepseekV4, expected: torch.Tensor) -> None:
    close(make_bench(model).run(random_text(LENGTH), [LENGTH]), expected)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 127, 128, 131])
def test_short(length: int, model: DeepseekV4, expected: torch.Tensor) -> None:
    """The model is causal, so the logits of a beginning are the beginning of the logits."""
    text = random_text(LENGTH)
    close(make_bench(model).run(text, [length]), expected[:length])


@pytest.mark.parametrize(
    "sizes",
    [[128, 128, 44], [17] * 17 + [11], [100, 33, 1, 1, 1, 1, 163], [1, 127, 3, 125, 44], [254, 1, 1, 1, 43]],
    ids=str,
)
def test_chunks(sizes: list[int], model: DeepseekV4, expected: torch.Tensor) -> None:
    close(make_bench(model).run(random_text(LENGTH), sizes), expected)


def test_token_by_token(model: DeepseekV4, expected: torch.Tensor) -> None:
    sizes = [1] * 40 + [80] + [1] * 12
    close(make_bench(model).run(random_text(LENGTH), sizes), expected[: sum(sizes)])


def test_decode_after_a_prompt_past_the_next_border(model: DeepseekV4, expected: torch.Tensor) -> None:
    close(make_bench(model).run(random_text(LENGTH), [245] + [1] * 15), expected[:260])


@settings(max_examples=8, deadline=None, derandomize=True)
@given(cuts=st.sets(st.integers(1, LENGTH - 1), max_size=6))
def test_any_chunks(cuts: set[int], model: DeepseekV4, expected: torch.Tensor) -> None:
    edges = [0, *sorted(cuts), LENGTH]
    sizes = [b - a for a, b in pairwise(edges)]
    close(make_bench(model).run(random_text(LENGTH), sizes), expected)


@settings(max_examples=6, deadline=None, derandomize=True)
@given(data=st.data())
def test_mixed_batches(data: st.DataObject, model: DeepseekV4, expected: torch.Tensor) -> None:
    """Requests at any stage share a step: alignment is each request's own, and nobody sees a neighbour."""
    bench = make_bench(model)
    texts = [random_text(LENGTH, first_page=1 + 4 * i, slot=3 - i) for i in range(4)]
    for _ in range(5):
        live = [t for t in texts if t.done < LENGTH]
        chunks = [(t, data.draw(st.integers(0, min(LENGTH - t.done, 110)) | st.just(1))) for t in live]
        chunks = sorted(((t, n) for t, n in chunks if n), key=lambda c: c[1] != 1)
        if chunks:
            spans = [slice(t.done, t.done + n) for t, n in chunks]
            close(bench.step(chunks), torch.cat([expected[s] for s in spans]))


def test_decoding_batch(model: DeepseekV4, expected: torch.Tensor) -> None:
    bench = make_bench(model)
    texts = [random_text(LENGTH, first_page=1 + 4 * i, slot=i) for i in range(4)]
    for text, n in zip(texts, (3, 126, 129, 200), strict=True):
        bench.run(text, [n])
    for _ in range(8):
        at = [t.done for t in texts]
        close(bench.step([(t, 1) for t in texts]), expected[at])


def test_a_slot_and_pages_are_reused_without_a_trace(model: DeepseekV4, oracle: Any) -> None:
    """The next request of a slot finds the last one's rows there and must not read them."""
    bench = make_bench(model)
    bench.run(random_text(LENGTH), [LENGTH])
    other = random_text(150, seed=9)
    close(bench.run(other, [60, 1, 1, 88]), logits_of(oracle, other))
