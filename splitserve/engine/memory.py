"""How many pages and slots an engine gets: arithmetic on the layout, the configuration and the memory that is free."""

from __future__ import annotations

from dataclasses import dataclass

from splitserve.config import EngineConfig
from splitserve.errors import CapacityError
from splitserve.spec import Layout

SHARE_OF_FREE = 0.2
"""Of the host's memory that is free when the weights are in; the rest is for activations and the other engines here."""

DEVICE_MARGIN = 3 << 30
DEVICE_MARGIN_SHARE = 0.1
"""Of a GPU's memory that is free when the weights are in, the larger of the two is left to activations and graphs.
A GPU is one engine's: where two share one, `memory_mb` says what each may have.
"""


@dataclass(frozen=True)
class Capacity:
    num_pages: int
    num_slots: int
    max_len: int  # longest prompt + output
    num_snapshots: int = 0  # slot units beside those of requests, for kv/snapshots.py


def size(config: EngineConfig, layout: Layout, *, model_max_len: int, free_bytes: int) -> Capacity:
    """Pages and slots of one rank. Never more pages than `max_seqs` requests of full length could use.

    Raises CapacityError, with the sum, when not even one page fits or the wanted length does not.
    """
    num_slots = config.max_seqs if layout.slot_bytes else 0
    num_snapshots = _num_snapshots(config, layout, free_bytes)
    slot_bytes = (num_slots + num_snapshots) * layout.slot_bytes
    wanted_len = min(config.max_len or model_max_len, model_max_len)
    if config.max_len > model_max_len:
        raise CapacityError(
            f"max_len={config.max_len} is longer than the model's {model_max_len}", field="max_len"
        )
    useful = config.max_seqs * -(-wanted_len // config.page_tokens)
    num_pages = config.num_pages or min(
        useful, (_budget(config, free_bytes) - slot_bytes) // layout.page_bytes
    )
    if num_pages < 1 or num_pages * layout.page_bytes + slot_bytes > free_bytes:
        num_pages = max(1, num_pages)
        raise CapacityError(
            f"{num_pages} pages of {layout.page_bytes:,} bytes and {num_slots + num_snapshots} slots of "
            f"{layout.slot_bytes:,} need "
            f"{num_pages * layout.page_bytes + slot_bytes:,} bytes; memory_mb={config.memory_mb}, "
            f"free memory {free_bytes:,}",
            field="memory_mb",
            fix=f"give at least {_mb(layout.page_bytes + slot_bytes)} MB (one page), or lower page_tokens or max_seqs",
        )
    holds = num_pages * config.page_tokens
    if config.max_len > holds:
        raise CapacityError(
            f"max_len={config.max_len} does not fit in {num_pages} pages of {config.page_tokens} tokens ({holds})",
            field="max_len",
            fix=f"give {_mb(-(-config.max_len // config.page_tokens) * layout.page_bytes + slot_bytes)} MB of memory",
        )
    return Capacity(num_pages, num_slots, min(wanted_len, holds), num_snapshots)


def _num_snapshots(config: EngineConfig, layout: Layout, free_bytes: int) -> int:
    """At least one, or no prompt of such a model would ever be found again."""
    if not layout.slot_bytes or not config.prefix_cache:
        return 0
    share = max(0, _budget(config, free_bytes)) // 10 // layout.slot_bytes
    return config.num_snapshots or max(1, min(config.max_seqs, share))


def _budget(config: EngineConfig, free_bytes: int) -> int:
    if config.memory_mb:
        return config.memory_mb * 10**6
    if config.device == "cuda":
        return free_bytes - max(DEVICE_MARGIN, int(free_bytes * DEVICE_MARGIN_SHARE))
    return int(free_bytes * SHARE_OF_FREE)


def _mb(nbytes: int) -> int:
    return -(-nbytes // 10**6)
