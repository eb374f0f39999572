"""Tensor parallel ranks give the logits of one rank: in threads for many sizes, in processes for the real thing."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from splitserve.dist.group import SoloGroup, make_group
from splitserve.errors import PeerLost
from splitserve.layers.forward import Group
from splitserve.models.read import read_config
from splitserve.models.registry import build
from splitserve.weights.locate import locate
from tests.ranks import free_port, on_ranks
from tests.tiny import Text, make_forward, make_pool, write_checkpoint

PAGE = 16
TEXTS = [[(7 * i + 3 * j) % 211 for j in range(n)] for i, n in enumerate((41, 20, 33))]


def compute(path: Path, tp: Group) -> torch.Tensor:
    """Logits of three texts: prompts in chunks, then a mixed step, as rank tp.rank of its group."""
    source = locate(path)
    cfg = read_config(source)
    model: Any = build(cfg, tp, dtype="f32")
    model.load(source)
    pool = make_pool(cfg, rank=tp.rank, size=tp.size, page_tokens=PAGE)
    texts = [Text(t, list(range(3 * i, 3 * i + 3))) for i, t in enumerate(TEXTS)]
    steps = [
        [(texts[0], 40), (texts[1], 7)],
        [(texts[1], 12), (texts[2], 1)],
        [(texts[0], 1), (texts[1], 1), (texts[2], 32)],
    ]
    return torch.cat([model.forward(make_forward(s, states=pool, tp=tp, page_tokens=PAGE)) for s in steps])


@pytest.mark.parametrize(
    ("family", "size", "changes"),
    [
        ("llama", 2, {}),
        ("llama", 4, {}),
        ("llama", 8, {}),  # 4 KV heads: two ranks hold each
        (
            "llama",
            3,
            {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 100},
        ),
        ("llama-tied-bias", 2, {}),
        ("qwen3", 2, {"vocab_size": 212}),
        ("qwen3-moe", 4, {}),
        ("mistral", 2, {"num_key_value_heads": 1}),
    ],
    ids=lambda v: str(v) if not isinstance(v, dict) else "",
)
def test_any_number_of_ranks_equals_one(
    family: str, size: int, changes: dict[str, Any], tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, family, **changes)
    alone = compute(tmp_path, SoloGroup())
    ranks = on_ranks(size, lambda group: compute(tmp_path, group))
    torch.testing.assert_close(ranks[0], alone, atol=1e-5, rtol=1e-5)
    assert all(torch.equal(r, ranks[0]) for r in ranks), "every rank samples for itself, from the same logits"


def _rank(rank: int, port: int, path: Path, answer: Any) -> None:
    torch.set_num_threads(1)
    group = make_group(rank, 2, port=port)
    answer.send(compute(path, group).numpy())
    try:
        while True:  # until the other is killed
            group.all_reduce(torch.ones(1))
    except PeerLost as e:
        answer.send(str(e))


def test_two_processes(tmp_path: Path) -> None:
    """As served: two processes over gloo. When one is killed the other learns it at once."""
    write_checkpoint(tmp_path, "llama")
    spawn, port = multiprocessing.get_context("spawn"), free_port()
    pipes = [spawn.Pipe() for _ in range(2)]
    ranks = [
        spawn.Process(target=_rank, args=(r, port, tmp_path, pipes[r][1]), daemon=True) for r in range(2)
    ]
    try:
        for rank in ranks:
            rank.start()
        alone = compute(tmp_path, SoloGroup())
        for mine, _ in pipes:
            assert mine.poll(90), "a rank did not answer"
            torch.testing.assert_close(torch.from_numpy(mine.recv()), alone, atol=1e-5, rtol=1e-5)
        assert ranks[1].pid
        os.kill(ranks[1].pid, signal.SIGKILL)
        assert pipes[0][0].poll(30), "the survivor hangs"
        assert "all_reduce on rank 0 of 2 failed" in pipes[0][0].recv()
    finally:
        for rank in ranks:
            rank.kill()
            rank.join(10)
