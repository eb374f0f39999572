"""The layers of DeepSeek-V4 on the kernels that a GPU would run, by Triton's interpreter, against the plain ones."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when kernels are defined, at their import below

from pathlib import Path
from typing import Any

import pytest
import torch

from splitserve.engine.replay import Replay
from splitserve.engine.step import Chunk
from splitserve.layers.v4 import kernels
from splitserve.layers.v4.gpu import GpuKernels
from splitserve.models import deepseek_v4
from splitserve.models.deepseek_v4_config import from_json
from splitserve.models.deepseek_v4_kernels import fits
from splitserve.models.make_checkpoint import FLASH, T1, TINY, write_checkpoint
from splitserve.ops.triton.v4 import sparse
from splitserve.types import SamplingParams
from tests.models.v4_oracle import PAGE, Bench, Text, load_model, make_bench, random_text

TWO_LAYERS = TINY | {"num_hidden_layers": 2, "num_hash_layers": 1, "compress_ratios": [4, 128, 0]}


def bench_on(ops: object, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, kv: str) -> Bench:
    monkeypatch.setattr(deepseek_v4, "kernels_for", lambda *_, **__: ops)
    model = load_model(checkpoint, dtype="bf16")
    assert model.ops is ops
    return make_bench(model, dtype="bf16", kv=kv)


LONG = pytest.mark.slow, pytest.mark.timeout(600)  # kernels are interpreted


@pytest.mark.parametrize(
    ("config", "kv", "steps"),
    [
        pytest.param(TWO_LAYERS, "fp8", ("any",), id="two layers"),
        pytest.param(TWO_LAYERS, "fp8", ("as many",), id="through scratch", marks=LONG),
        pytest.param(TINY, "fp8", ("chunk", "known", "any", "any"), id="all", marks=LONG),
        pytest.param(TINY, "bf16", ("chunk", "any"), id="bf16 rows", marks=LONG),
    ],
)
def test_the_gpu_s_kernels_compute_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], kv: str, steps: tuple[str, ...]
) -> None:
    """A chunk beside a single token, served as many tokens are too, single tokens of known lengths, and of any; each
    from the same state.
    """
    if "as many" in steps:
        tuned, way, ways = sparse.tuned, sparse._way, []
        monkeypatch.setattr(
            sparse, "tuned", lambda k, *a: {"SCRATCH": True} if k == "attend_scratch" else tuned(k, *a)
        )
        monkeypatch.setattr(sparse, "_way", lambda *a: ways.append(found := way(*a)) or found)
    write_checkpoint(tmp_path, config)
    plain = bench_on(kernels, tmp_path, monkeypatch, kv)
    ours = bench_on(GpuKernels(exact=True), tmp_path, monkeypatch, kv)
    texts = [[random_text(60, seed=s, first_page=1 + s, slot=s) for s in range(2)] for _ in range(2)]
    plain.step([(texts[0][0], 37), (texts[0][1], 6)])
    for text in texts[1]:
        text.done = {0: 37, 1: 6}[text.slot]
    replay = Replay(
        ours.model,
        ours.pool,
        page_tokens=PAGE,
        tp=ours.tp,
        device=torch.device("cpu"),
        max_seqs=2,
        max_len=256,
    )
    for step in steps:
        for kind, memory in plain.pool.memory.items():
            ours.pool.memory[kind].copy_(memory)
        if step == "any":
            chunks = [single(t) for t in texts[1]]
            if not replay.most:
                replay._sizes = (2,)
                replay.prepare()
            got = replay.start(chunks, [-1, -1], {}).logits
            for text in texts[1]:
                text.done += 1
        else:
            got = ours.step(list(zip(texts[1], (1, 1) if step == "known" else (3, 1), strict=True)))
        want = plain.step(
            list(zip(texts[0], (3, 1) if step in ("chunk", "as many") else (1, 1), strict=True))
        )
        assert distance(got, want) < 0.15, step
    if "as many" in steps:
        assert ways == [sparse.attend_many] * 2


def single(text: Text) -> Chunk:
    at = text.done
    return Chunk(
        str(text.slot), at, at + 1, (text.tokens[at],), tuple(text.pages), text.slot, sample=True,
        sampling=SamplingParams(temperature=0.0),
    )  # fmt: skip


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    """Mean difference by the logits' own spread. Both are in bf16, which the interpreter cuts off."""
    if not got.isfinite().all():
        return float("inf")
    return (got - want).abs().mean().item() / want.std().item()


def test_which_sizes_they_take() -> None:
    for config, tp, expected in (
        (FLASH, 1, True),
        (FLASH, 4, True),
        (T1, 2, True),
        (TINY, 1, True),
        (TINY, 2, False),
    ):
        assert fits(from_json(config, Path("config.json")), tp) is expected
    assert not fits(from_json(TINY | {"head_dim": 192}, Path("config.json")), 1)
