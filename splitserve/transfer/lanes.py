"""Judges what carries bytes between ranks on GPUs: pure, on two cards and a lane's name as the transport tells it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from splitserve.wire import Card

PEER_MEMORY = "cuda_ipc"
"""UCX's name for writing another GPU's memory directly, over NVLink or PCIe."""


def on_one_host(mine: Card, theirs: Card) -> bool:
    """Whether both keep their state on GPUs of one host, so that one could write the other's memory directly."""
    return mine.host == theirs.host and _on_gpu(mine) and _on_gpu(theirs)


def large_lane(lane: str) -> str:
    """Of a lane that differs by size ("0..8184: tcp/lo; 8185..inf: cma/memory"): what carries large writes."""
    return lane.rsplit("; ", 1)[-1]


def slow_lane(peer: str, lane: str) -> str:
    """What to warn of where large writes between GPUs of one host do not go to peer memory, else "".

    `lane` may name one lane for each range of sizes, largest last (nixl.put_lanes); "" and "unknown" say nothing.
    """
    large = large_lane(lane)
    if large in ("", "unknown") or PEER_MEMORY in large:
        return ""
    return (
        f"state goes to {peer} over {large}, not over {PEER_MEMORY}: up to a thousand times slower than peer memory. "
        "`nvidia-smi topo -p2p w` says whether the GPUs have peer access; if they have, let [transfer] ucx and UCX_TLS "
        f"allow {PEER_MEMORY}, and start both engines in one container with its IPC namespace"
    )


class SeenLanes:
    """The lane to each peer that bytes have gone to: asked once, since reading lanes is slow and none is known before.

    `slow` has peers whose memory on a GPU is not reached as peer memory, and what is to be said of it.
    """

    def __init__(self) -> None:
        self.slow: dict[str, str] = {}
        self._lanes: dict[str, str] = {}

    def look(self, mine: Card, theirs: Card, read: Callable[[], Mapping[str, str]]) -> str:
        """What to warn of at the first look at this peer, else ""."""
        peer = theirs.agent_name
        if peer in self._lanes:
            return ""
        self._lanes[peer] = lane = read().get(peer, "")
        why = slow_lane(peer, lane) if on_one_host(mine, theirs) else ""
        if why:
            self.slow[peer] = why
        return why

    def used(self) -> tuple[str, ...]:
        """What has carried bytes from here so far, each once."""
        return tuple(sorted({lane for lane in self._lanes.values() if lane not in ("", "unknown")}))


def _on_gpu(card: Card) -> bool:
    return bool(card.slabs) and all(slab.device >= 0 for slab in card.slabs)
