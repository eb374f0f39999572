"""Slabs and views: a view's element is the byte that the layout's arithmetic names."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch
from state_cases import rich_specs

from splitserve.errors import CapacityError, InvariantError
from splitserve.kv.pool import DTYPES, Pool
from splitserve.spec import Growth, Kind, StateSpec, lay_out


def _allocate(nbytes: int) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8)


def _pool(
    specs: list[StateSpec], *, rank: int = 0, size: int = 1, num_pages: int = 3, num_slots: int = 2
) -> Pool:
    layout = lay_out(specs, page_tokens=8, rank=rank, size=size)
    return Pool(
        specs, layout=layout, num_pages=num_pages, num_slots=num_slots, device="cpu", allocate=_allocate
    )


@pytest.mark.parametrize(("rank", "size"), [(0, 1), (1, 2), (5, 8)])
def test_views_are_where_the_fields_are(rank: int, size: int) -> None:
    pool = _pool(rich_specs(4), rank=rank, size=size)
    for f in pool.layout.page_fields + pool.layout.slot_fields:
        spec = f.spec
        first = min(g.piece for g in pool.layout.page_fields + pool.layout.slot_fields if g.spec == spec)
        view = pool.view(spec.name, spec.layer)
        assert view.dtype == DTYPES.get(spec.encoding, torch.uint8)
        assert view.shape[2:] == (f.rows_per_unit, spec.row_bytes // spec.element_bytes)
        row = torch.randint(0, 256, (spec.row_bytes,), dtype=torch.uint8)
        unit, index = 1, f.rows_per_unit - 1
        view[unit, f.piece - first, index] = row.view(view.dtype)
        at = f.offset + index * f.row_stride
        assert torch.equal(pool.unit_bytes_at(spec.kind, unit)[at : at + spec.row_bytes], row)


def test_slabs_describe_the_memory() -> None:
    pool = _pool(rich_specs(4))
    assert [(s.kind, s.unit_bytes, s.count, s.device) for s in pool.slabs] == [
        (Kind.PAGE, pool.layout.page_bytes, 3, -1),
        (Kind.SLOT, pool.layout.slot_bytes, 2, -1),
    ]
    for slab in pool.slabs:
        assert slab.addr == pool.memory[slab.kind].data_ptr()
        assert pool.unit_bytes_at(slab.kind, 1).data_ptr() == slab.addr + slab.unit_bytes


def test_a_model_without_slot_state_has_no_slot_slab() -> None:
    pool = _pool([StateSpec("kv", 0, Growth.PAGED, 64)], num_slots=0)
    assert [s.kind for s in pool.slabs] == [Kind.PAGE]


@pytest.mark.parametrize("encoding", ["f32", "bf16", "f16"])
def test_poison_is_nan_in_every_encoding_and_spares_the_other_units(encoding: str) -> None:
    specs = [
        StateSpec("kv", 0, Growth.PAGED, 64, pieces=2, encoding=encoding),
        StateSpec("window", 0, Growth.RING, 64, rows=5, encoding=encoding),
    ]
    pool = _pool(specs)
    pool.poison([0, 2], [1])
    assert pool.view("kv", 0).isnan().flatten(1).all(1).tolist() == [True, False, True]
    assert pool.view("window", 0).isnan().flatten(1).all(1).tolist() == [False, True]
    assert not pool.view("kv", 0)[1].any()
    pool.poison([])


def test_offsets_beyond_four_gigabytes() -> None:
    """Virtual memory only: fresh pages of it are touched where the test writes."""
    specs = [StateSpec("kv", layer, Growth.PAGED, 1 << 16, pieces=4, encoding="f32") for layer in range(2)]
    layout = lay_out(specs, page_tokens=64)
    num_pages = 5 * 2**30 // layout.page_bytes

    def untouched(nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    with Pool(
        specs, layout=layout, num_pages=num_pages, num_slots=0, device="cpu", allocate=untouched
    ) as pool:
        pool.view("kv", 1)[num_pages - 1, 3, 63] = 7.0
        last = pool.unit_bytes_at(Kind.PAGE, num_pages - 1)[-(1 << 16) :].view(torch.float32)
        assert (last == 7.0).all()


def test_no_memory_says_what_one_page_needs() -> None:
    specs = [StateSpec("kv", 0, Growth.PAGED, 64)]
    layout = lay_out(specs, page_tokens=8)

    def full(nbytes: int) -> torch.Tensor:
        raise OSError(28, "No space left on device")

    with pytest.raises(
        CapacityError, match=r"one page of 8 tokens needs 512 bytes; .*No space left"
    ) as refused:
        Pool(specs, layout=layout, num_pages=4, num_slots=0, device="cpu", allocate=full)
    assert "4 pages of 512 bytes (2,048 bytes)" in refused.value.message
    with pytest.raises(CapacityError, match="needs 512 bytes"):
        Pool(specs, layout=layout, num_pages=0, num_slots=0, device="cpu", allocate=_allocate)


def test_more_than_the_machine_has_is_a_capacity_error() -> None:
    specs = [StateSpec("kv", 0, Growth.PAGED, 1 << 20)]
    layout = lay_out(specs, page_tokens=1024)
    with pytest.raises(CapacityError, match="no memory for"):
        Pool(specs, layout=layout, num_pages=1 << 20, num_slots=0, device="cpu", allocate=_allocate)


def test_memory_of_the_wrong_size_is_refused() -> None:
    specs = [StateSpec("kv", 0, Growth.PAGED, 64)]
    with pytest.raises(InvariantError, match="returned"):
        Pool(
            specs,
            layout=lay_out(specs, page_tokens=8),
            num_pages=4,
            num_slots=0,
            device="cpu",
            allocate=lambda n: _allocate(n + 1),
        )


def test_an_undeclared_state_is_named() -> None:
    with pytest.raises(InvariantError, match=r"no state 'k' of layer 0 here; states are \['kv'\]"):
        _pool([StateSpec("kv", 0, Growth.PAGED, 64)]).view("k", 0)


def test_close_lets_the_memory_go() -> None:
    specs = [StateSpec("kv", 0, Growth.PAGED, 64)]
    owners = []

    def allocate(nbytes: int) -> torch.Tensor:
        owner = np.zeros(nbytes, np.uint8)
        owners.append(weakref.ref(owner))
        return torch.from_numpy(owner)

    pool = Pool(
        specs, layout=lay_out(specs, page_tokens=8), num_pages=2, num_slots=0, device="cpu", allocate=allocate
    )
    assert owners[0]() is not None
    pool.close()
    assert owners[0]() is None
    assert pool.slabs == ()
