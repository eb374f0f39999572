"""Passes taken apart (engine/pieces.py) against passes in one go, on a CPU, where nothing is recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from splitserve.dist.group import SoloGroup
from splitserve.engine.pieces import Pieces, sizes_upto
from splitserve.models.make_checkpoint import TINY, write_checkpoint
from tests.models.test_parity import PAGE, load, text
from tests.models.v4_oracle import forward_of, load_model, make_bench, random_text
from tests.tiny import make_forward, make_pool
from tests.tiny import write_checkpoint as write_family

CPU = torch.device("cpu")


def pieces_of(model: Any, *, most: int) -> Pieces:
    found = Pieces(model, tp=SoloGroup(), device=CPU, most=most)
    found.prepare()
    return found


def test_a_pass_takes_the_next_larger_size() -> None:
    assert sizes_upto(2048)[-2:] == (1792, 2048)
    assert sizes_upto(100) == (16, 64, 100)


def test_deepseek_apart_and_in_one_go(tmp_path: Path) -> None:
    """Prompts, chunks that go on, single tokens beside them; more entries than are read; poison behind short passes."""
    write_checkpoint(tmp_path, TINY)
    model = load_model(tmp_path)
    whole, apart = make_bench(model), make_bench(model)
    pieces = pieces_of(model, most=400)
    texts = [
        [random_text(n, seed=n, first_page=1 + 4 * i, slot=i) for i, n in enumerate((390, 140, 9))]
        for _ in range(2)
    ]
    for sizes in ((200, 0, 5), (150, 131, 1), (1, 1, 1), (39, 8, 2)):
        steps = [[(t, n) for t, n in zip(some, sizes, strict=True) if n] for some in texts]
        want = whole.step(steps[0])
        with torch.inference_mode():
            for out in pieces._outs.values():
                out.fill_(float("nan"))
        got = pieces.forward(forward_of(steps[1], apart.pool, apart.tp))
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    for kind, memory in whole.pool.memory.items():
        same = apart.pool.memory[kind]
        assert torch.equal((memory == 0xFF).all(1), (same == 0xFF).all(1)), kind
        wrong = (memory != same).view(len(memory), -1).float().mean(1)
        assert wrong.max() < 0.1, kind  # float32 sums in another order


@pytest.mark.parametrize("family", ["llama", "qwen3-moe", "qwen2-window"])
def test_decoders_apart_and_in_one_go(family: str, tmp_path: Path) -> None:
    write_family(tmp_path, family)
    model = load(tmp_path)
    pieces = pieces_of(model, most=64)
    logits = []
    for forward in (model.forward, pieces.forward):
        states, long, short = make_pool(model.cfg), text(90), text(40, seed=1, first_page=8)
        mixes = [(long, 50)], [(short, 1), (long, 20)], [(short, 1), (long, 1)], [(short, 38), (long, 19)]
        for steps in mixes:
            fwd = make_forward(steps, states=states, tp=SoloGroup(), page_tokens=PAGE)
            logits.append(forward(fwd))
    half = len(logits) // 2
    for want, got in zip(logits[:half], logits[half:], strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
