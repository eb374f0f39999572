"""Which way a sum between GPUs goes: decided by times, the same on every rank. The sums themselves: tests/gpu."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from splitserve.dist import peers
from splitserve.dist.group import TorchGroup
from splitserve.dist.peers import SIZES, PeerGroup, choose
from splitserve.errors import ConfigError
from tests.ranks import on_ranks

CPU = torch.device("cpu")


class Recorder:
    """A group that says who was asked."""

    rank, size = 0, 2

    def __init__(self, name: str, log: list[str]) -> None:
        self._name, self._log = name, log

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self._log.append(f"{self._name} sums")
        return x

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        self._log.append(f"{self._name} joins")
        return x


def chosen(ours: list[float], theirs: list[float], *, tell: Any = lambda _, word: [word]) -> int:
    """`choose` with times that are given, one of each for each size."""
    places = {nbytes // 2: i for i, nbytes in enumerate(SIZES)}
    return choose(
        lambda x: x,
        lambda x: -x,
        tell=tell,
        device=CPU,
        time=lambda reduce, x: (ours if reduce(x) is x else theirs)[places[len(x)]],
    )


def test_sums_go_the_faster_way_up_to_the_size_where_that_ends():
    slow_later = [3.0 + i * i for i in range(len(SIZES))]
    assert chosen(slow_later, [12.5] * len(SIZES)) == SIZES[3]
    assert chosen([1.0] * len(SIZES), [2.0] * len(SIZES)) == SIZES[-1]
    assert chosen([2.0] * len(SIZES), [1.0] * len(SIZES)) == 0


times = st.lists(st.floats(0.1, 100), min_size=len(SIZES), max_size=len(SIZES))


@given(st.lists(st.tuples(times, times), min_size=2, max_size=4))
def test_every_rank_decides_the_same_from_what_all_have_measured(
    ranks: list[tuple[list[float], list[float]]],
):
    words: list[str] = []
    for ours, theirs in ranks:

        def tell(_: str, word: str) -> list[str]:
            words.append(word)
            return [word]

        chosen(ours, theirs, tell=tell)
    found = {chosen(ours, theirs, tell=lambda *_: words) for ours, theirs in ranks}
    assert len(found) == 1


def test_long_sums_and_other_numbers_take_the_plain_way():
    log: list[str] = []
    group = PeerGroup(Recorder("nccl", log), Recorder("peers", log), upto=1024, shared=False)  # type: ignore[arg-type]
    bf16 = torch.zeros(512, dtype=torch.bfloat16)
    for x in (bf16, bf16.repeat(2), torch.zeros(8, dtype=torch.int64), torch.zeros(4, 4).t()[:, :2]):
        group.all_reduce(x)
    group.all_gather(bf16, 0)
    assert log == ["peers sums", "nccl sums", "nccl sums", "nccl sums", "nccl joins"]
    assert group.how == "peer memory up to 1,024 bytes, NCCL above"


def test_ranks_that_share_a_gpu_have_no_other_way():
    log: list[str] = []
    group = PeerGroup(Recorder("nccl", log), Recorder("peers", log), upto=0, shared=True)  # type: ignore[arg-type]
    group.all_reduce(torch.zeros(1 << 12))
    group.all_gather(torch.zeros(4), 0)
    assert log == ["peers sums", "peers joins"]


def test_every_rank_hears_what_each_has_said():
    assert on_ranks(3, lambda g: g.tell("size", str(10 + g.rank))) == [["10", "11", "12"]] * 3


def test_one_rank_without_peer_memory_leaves_all_to_nccl(monkeypatch: pytest.MonkeyPatch):
    def broken(group: TorchGroup, *_: Any, **__: Any) -> Recorder:
        if group.rank == 1:
            raise RuntimeError("no mapping\nand a trace")
        return Recorder("peers", [])

    monkeypatch.setattr(peers, "Peers", broken)
    monkeypatch.setattr(peers, "_no_access", lambda *_: "")
    found = on_ranks(2, lambda g: peers.join(g, CPU, shared=False) is g)
    assert found == [True, True]

    def shared(group: TorchGroup) -> str:
        with pytest.raises(ConfigError, match=r"its memory cannot be shared: no mapping$") as e:
            peers.join(group, CPU, shared=True)
        return str(e.value.field)

    assert on_ranks(2, shared) == ["gpus", "gpus"]


def test_without_peer_access_nobody_tries(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(peers, "Peers", None)  # calling it would be a TypeError
    monkeypatch.setattr(peers, "_no_access", lambda *_: "cuda:0 has no peer access to cuda:1")
    assert on_ranks(2, lambda g: peers.join(g, CPU, shared=False) is g) == [True, True]
