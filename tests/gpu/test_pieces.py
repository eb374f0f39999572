"""Prompts as graphs and what runs between them (engine/pieces.py) against the same passes in one go, on T1."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from splitserve.dist.group import SoloGroup
from splitserve.engine import batch
from splitserve.engine.pieces import Pieces
from splitserve.engine.step import Chunk, Step
from splitserve.kv.pool import Pool
from splitserve.layers.forward import Forward
from splitserve.layers.v4.gpu import GpuKernels
from splitserve.models import deepseek_v4, registry
from splitserve.models.make_checkpoint import T1, write_checkpoint
from splitserve.models.read import read_config
from splitserve.spec import lay_out
from splitserve.types import SamplingParams
from splitserve.weights.locate import locate

pytestmark = pytest.mark.gpu
PAGE = 256


@pytest.fixture(scope="module", params=["rounded", "exact"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """With rows rounded to e4m3 before products, as it is served, and without."""
    path: Path = tmp_path_factory.mktemp("t1")
    write_checkpoint(path, T1)
    source = locate(path)
    with pytest.MonkeyPatch.context() as patch:
        kernels = GpuKernels(exact=request.param == "exact")
        patch.setattr(deepseek_v4, "kernels_for", lambda *_, **__: kernels)
        found: Any = registry.build(read_config(source), SoloGroup(), dtype="bf16", device="cuda")
        found.load(source)
    return found


def logits_and_state(
    model: Any, forward: Callable[[Forward], torch.Tensor], steps: list[tuple[int, ...]]
) -> tuple[list[torch.Tensor], Pool]:
    """Of two texts that grow by `steps`."""
    specs = registry.states(model.cfg, dtype="bf16")
    pool = Pool(
        specs,
        layout=lay_out(specs, page_tokens=PAGE),
        num_pages=16,
        num_slots=3,
        device="cuda",
        allocate=lambda n: torch.empty(n, dtype=torch.uint8, device="cuda"),
    )
    pool.poison(range(16), range(3))
    draw = random.Random(5)
    texts = [[draw.randrange(model.cfg.vocab) for _ in range(1700)] for _ in range(2)]
    pages, done, out = [range(1, 8), range(8, 15)], [0, 0], []
    for counts in steps:
        chunks = []
        for i, n in enumerate(counts):
            start, done[i] = done[i], done[i] + n
            used = tuple(pages[i][: -(-done[i] // PAGE)])
            tokens = tuple(texts[i][start : done[i]])
            chunks.append(
                Chunk(
                    str(i),
                    start,
                    done[i],
                    tokens,
                    used,
                    i,
                    sample=True,
                    sampling=SamplingParams(temperature=0),
                )
            )
        fwd = batch.build(
            batch.in_forward_order(Step(0, tuple(c for c in chunks if c.num_tokens))),
            {},
            page_tokens=PAGE,
            states=pool,
            tp=SoloGroup(),
            device=torch.device("cuda"),
            between_layers=lambda: None,
        )
        out.append(forward(fwd).clone())
    return out, pool


def test_sizes_that_are_recorded_give_the_same_bits(model: Any) -> None:
    pieces = Pieces(model, tp=SoloGroup(), device=torch.device("cuda"), most=512)
    pieces.prepare()
    steps = [(256, 128), (512, 0), (100, 28), (64, 64)]
    want, known = logits_and_state(model, model.forward, steps)
    for _ in range(2):
        got, pool = logits_and_state(model, pieces.forward, steps)
        for i, (a, b) in enumerate(zip(want, got, strict=True)):
            assert torch.equal(a, b), f"step {i}: {(a - b).abs().max()}"
        for kind, memory in known.memory.items():
            assert torch.equal(memory, pool.memory[kind]), kind
    pieces.close()


def test_sizes_between_them_give_nearly_the_same(model: Any) -> None:
    pieces = Pieces(model, tp=SoloGroup(), device=torch.device("cuda"), most=1024)
    pieces.prepare()
    steps = [(700, 130), (7, 21), (1, 300), (1, 1), (513, 2)]
    want, _ = logits_and_state(model, model.forward, steps)
    bound = (
        0.03 if model.ops._exact else 0.2
    )  # other tiles for other sizes; a rounding that falls elsewhere is e4m3's
    for _ in range(2):
        got, _ = logits_and_state(model, pieces.forward, steps)
        for a, b in zip(want, got, strict=True):
            assert b.isfinite().all()
            assert (a - b).abs().mean() < bound * a.std()
    pieces.close()
