"""DeepSeek-V4's state from one group of ranks to another: its latent is one piece, and each rank gets it once."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec import structs
from state_cases import Rank

from splitserve.models.deepseek_v4_config import from_json
from splitserve.models.deepseek_v4_states import deepseek_v4_states
from splitserve.models.make_checkpoint import FLASH, T1, TINY
from splitserve.spec import Kind, StateSpec, live_bytes
from splitserve.transfer.layout import Link, link_bytes

PROMPT = 300  # 0 and 44 beyond a multiple of 4 and of 128

CONFIGS = {"tiny": TINY | {"o_groups": 4}, "t1": T1, "flash": FLASH}


def states(config: str, **how: object) -> list[StateSpec]:
    cfg = from_json(CONFIGS[config], Path("config.json"))
    return deepseek_v4_states(cfg, **{"dtype": "bf16", "kv": "fp8", "draft": True, **how})


def owed(specs: list[StateSpec], src: int, dst: int, *, start: int = 0) -> dict[tuple[int, int], int]:
    """(source rank, destination rank) -> bytes, of all pairs of ranks that are owed any."""
    groups = ([Rank(specs, page_tokens=128, rank=r, size=n, units=()) for r in range(n)] for n in (src, dst))
    sources, targets = groups
    found = {
        (s, d): link_bytes(a.card, b.card, start=start, stop=PROMPT, last=True)
        for s, a in enumerate(sources)
        for d, b in enumerate(targets)
    }
    return {pair: num for pair, num in found.items() if num}


@pytest.mark.parametrize("config", CONFIGS)
def test_four_to_four_is_four_equal_links(config: str) -> None:
    """Every rank writes to the rank beside it, all of the state, and nobody else writes there."""
    specs = states(config)
    whole = live_bytes(specs, 0, PROMPT)
    assert owed(specs, 4, 4) == {(r, r): whole for r in range(4)}


@pytest.mark.parametrize(
    ("src", "dst", "pairs"),
    [
        (4, 2, {(0, 0), (2, 1)}),
        (2, 4, {(0, 0), (0, 1), (1, 2), (1, 3)}),
        (4, 8, {(s, d) for d in range(8) for s in [d // 2]}),
        (8, 4, {(2 * d, d) for d in range(4)}),
        (1, 4, {(0, d) for d in range(4)}),
    ],
    ids=lambda v: str(v) if isinstance(v, int) else "",
)
def test_the_nearest_rank_sends(src: int, dst: int, pairs: set[tuple[int, int]]) -> None:
    specs = states("t1")
    assert owed(specs, src, dst) == dict.fromkeys(pairs, live_bytes(specs, 0, PROMPT))


def test_what_decode_has_is_left_out_on_every_link() -> None:
    """From a prefix hit of two pages on: the rest of the pages, and the slot whole."""
    specs = states("flash")
    left = live_bytes(specs, 256, PROMPT)
    assert owed(specs, 4, 4, start=256) == {(r, r): left for r in range(4)}
    assert left < live_bytes(specs, 0, PROMPT)


def test_the_slots_of_all_layers_are_a_handful_of_columns() -> None:
    """Row by row they were 1.5 ms of every handoff, and its bytes take a tenth of that."""
    specs = states("flash")
    a, b = (Rank(specs, page_tokens=256, rank=0, size=1, units=()) for _ in range(2))
    link = Link(a.card, b.card)
    assert len(link._slotted) <= 10 < 100 < sum(spec.kind is Kind.SLOT for spec in specs)
    apart = next(
        i for i, f in enumerate(b.card.fields) if f.spec.kind is Kind.SLOT
    )  # of one name, the first layer
    moved = structs.replace(b.card.fields[apart], offset=b.card.fields[apart].offset + (1 << 20))
    fields = (*b.card.fields[:apart], moved, *b.card.fields[apart + 1 :])
    other = Link(a.card, structs.replace(b.card, fields=fields))
    assert len(other._slotted) == len(link._slotted) + 1  # side by side at one end is not enough
