"""Judges what carries bytes between ranks on GPUs: pure, on two cards and a lane's name as the transport tells it."""

from __future__ import annotations

from splitserve.wire import Card

PEER_MEMORY = "cuda_ipc"
"""UCX's name for writing another GPU's memory directly, over NVLink or PCIe."""


def on_one_host(mine: Card, theirs: Card) -> bool:
    """Whether both keep their state on GPUs of one host, so that one could write the other's memory directly."""
    return mine.host == theirs.host and _on_gpu(mine) and _on_gpu(theirs)


def slow_lane(peer: str, lane: str) -> str:
    """What to warn of where large writes between GPUs of one host do not go to peer memory, else "".

    `lane` may name one lane for each range of sizes, largest last (nixl.put_lanes); "" and "unknown" say nothing.
    """
    large = lane.rsplit("; ", 1)[-1]
    if large in ("", "unknown") or PEER_MEMORY in large:
        return ""
    return (
        f"state goes to {peer} over {large}, not over {PEER_MEMORY}: up to a thousand times slower than peer memory. "
        "`nvidia-smi topo -p2p w` says whether the GPUs have peer access; if they have, let [transfer] ucx and UCX_TLS "
        f"allow {PEER_MEMORY}, and start both engines in one container with its IPC namespace"
    )


def _on_gpu(card: Card) -> bool:
    return bool(card.slabs) and all(slab.device >= 0 for slab in card.slabs)
