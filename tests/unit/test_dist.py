"""Groups of ranks over gloo, one thread a rank: sums, joins, meeting in vain, and a peer that leaves."""

from __future__ import annotations

import socket
import threading
import time

import psutil
import pytest
import torch

from splitserve.dist.group import SoloGroup, TorchGroup, make_group
from splitserve.errors import ConfigError, PeerLost, PortTaken
from tests.ranks import free_port, on_ranks


def test_all_reduce_sums_in_place() -> None:
    def work(group: TorchGroup) -> torch.Tensor:
        x = torch.arange(6.0).view(2, 3) + 10 * group.rank
        assert group.all_reduce(x) is x
        return x

    for got in on_ranks(3, work):
        assert torch.equal(got, 3 * torch.arange(6.0).view(2, 3) + 30)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_all_gather_joins_in_rank_order(dim: int) -> None:
    def part(rank: int) -> torch.Tensor:
        return (torch.arange(6.0) + 10 * rank).view(3, 2).t()  # not contiguous

    for got in on_ranks(2, lambda g: g.all_gather(part(g.rank), dim)):
        assert torch.equal(got, torch.cat([part(0), part(1)], dim))


def test_two_groups_live_in_one_process() -> None:
    def work(outer: TorchGroup) -> list[torch.Tensor]:
        return on_ranks(2, lambda g: g.all_reduce(torch.ones(1) * (1 + outer.rank)))

    assert [float(x) for pair in on_ranks(2, work) for x in pair] == [2, 2, 4, 4]


def test_alone_nothing_happens() -> None:
    group = make_group(0, 1)
    x = torch.randn(3)
    assert isinstance(group, SoloGroup)
    assert (group.rank, group.size) == (0, 1)
    assert group.all_reduce(x) is x
    assert group.all_gather(x, 0) is x
    group.close()


def test_a_rank_that_never_comes_is_an_error_with_its_place() -> None:
    begun = time.monotonic()
    with pytest.raises(PeerLost, match=r"rank 0 of 2 did not meet its group at 127.0.0.1:\d+"):
        TorchGroup(0, 2, host="127.0.0.1", port=free_port(), timeout_s=1.0)
    assert time.monotonic() - begun < 15
    with pytest.raises(ConfigError, match="rank 2 of a group of 2"):
        TorchGroup(2, 2, host="127.0.0.1", port=free_port())


def test_the_meeting_place_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(PortTaken, match=f"127.0.0.1:{port}"):
            TorchGroup(0, 2, host="127.0.0.1", port=port, timeout_s=1.0)


def test_nobody_listens_beyond_the_loopback() -> None:
    """The store and gloo take orders from whoever connects."""

    def work(group: TorchGroup) -> set[str]:
        group.all_reduce(torch.ones(1))
        mine = psutil.Process().net_connections("inet")
        return {c.laddr.ip for c in mine if c.status == psutil.CONN_LISTEN}

    before = {c.laddr.ip for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN}
    for found in on_ranks(2, work):
        assert found - before <= {"127.0.0.1"}
        assert found


def test_a_rank_that_leaves_breaks_the_others_collective() -> None:
    left = threading.Event()

    def work(group: TorchGroup) -> str:
        group.all_reduce(torch.ones(1))
        if group.rank == 1:
            group.close()
            left.set()
            return "left"
        assert left.wait(20)
        with pytest.raises(PeerLost, match="all_reduce on rank 0 of 2 failed"):
            group.all_reduce(torch.ones(1))
        return "told"

    begun = time.monotonic()
    assert on_ranks(2, work, timeout_s=10.0) == ["told", "left"]
    assert time.monotonic() - begun < 25
