"""GPUs without a GPU: which device a rank takes, what waits for which step, digests by the device's code, lanes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from state_cases import rich_specs

from splitserve.config import EngineConfig
from splitserve.engine import device, memory
from splitserve.engine.digests import DeviceDigests
from splitserve.engine.step import Step
from splitserve.errors import CapacityError, ConfigError
from splitserve.kv.pool import Pool
from splitserve.spec import Growth, Kind, Slab, StateSpec, Units, lay_out
from splitserve.transfer.digest import HostDigests
from splitserve.transfer.lanes import on_one_host, slow_lane
from splitserve.transfer.port import Port
from splitserve.wire import Card


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """A machine whose GPUs are what the test says."""
    seen: dict[str, Any] = {"count": 2, "arch": (9, 0), "current": None}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: seen["count"] > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: seen["count"])
    monkeypatch.setattr(torch.cuda, "set_device", lambda d: seen.update(current=d))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: seen["arch"])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Some GPU")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (5, 100))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 90)
    return seen  # type: ignore[return-value]


def test_a_rank_takes_the_gpu_of_its_number(gpus: dict[str, Any]) -> None:
    assert device.take("cuda", rank=1, tp=2) == torch.device("cuda:1") == gpus["current"]
    assert device.take("cpu", rank=1, tp=2) == torch.device("cpu")


def test_ranks_may_share_a_gpu_that_is_named_twice(
    gpus: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert device.take("cuda", rank=2, tp=4, gpus=(0, 0, 1, 1)) == torch.device("cuda:1")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    assert [device.sharers((0, 0, 1), r) for r in range(3)] == [2, 2, 1]
    assert device.free_bytes(torch.device("cuda:0"), ranks=2) == 2
    for named in ((0, 2), (0,)):
        with pytest.raises(ConfigError, match="2 can be seen") as e:
            device.take("cuda", rank=0, tp=2, gpus=named)
        assert e.value.field == "gpus"


@pytest.mark.parametrize(
    ("machine", "field", "words"),
    [
        ({"count": 0}, "device", "finds no GPU"),
        ({"count": 1}, "tp", "tp=2 needs as many GPUs, 1 can be seen"),
        ({"arch": (7, 5)}, "device", "Some GPU is sm_75; sm_80 is the oldest"),
    ],
)
def test_what_is_missing_is_said(
    gpus: dict[str, Any], machine: dict[str, Any], field: str, words: str
) -> None:
    gpus.update(machine)
    with pytest.raises(ConfigError, match=words) as e:
        device.take("cuda", rank=0, tp=2)
    assert e.value.field == field
    assert e.value.fix


def test_a_full_gpu_is_told_with_the_sum(gpus: dict[str, Any]) -> None:
    with (
        pytest.raises(CapacityError, match="of 100 bytes this rank holds 90, 5 are free"),
        device.in_memory(torch.device("cuda:0"), "the model"),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_a_gpu_is_filled_but_for_a_margin() -> None:
    layout = lay_out([StateSpec("kv", 0, Growth.PAGED, 1 << 20)], page_tokens=16)
    config = EngineConfig(model="m", device="cuda", page_tokens=16, max_seqs=10**6)

    def pages(free: int, **more: Any) -> int:
        return memory.size(replace(config, **more), layout, model_max_len=10**6, free_bytes=free).num_pages

    assert pages(100 << 30) * layout.page_bytes == pytest.approx(90 << 30, rel=1e-3)
    assert pages(4 << 30) * layout.page_bytes == pytest.approx(1 << 30, rel=0.02)
    assert pages(4 << 30, memory_mb=3221) * layout.page_bytes == pytest.approx(3 << 30, rel=0.01)
    with pytest.raises(CapacityError):
        pages(3 << 30)


class Event:
    def __init__(self) -> None:
        self.passed = self.recorded = False

    def record(self) -> None:
        self.recorded = True

    def query(self) -> bool:
        return self.passed


def test_a_step_has_ended_when_its_event_has_passed() -> None:
    events: list[Event] = []

    class Launching:
        def launch(self, step: Step) -> Any:
            assert all(e.recorded for e in events)
            return step

    def event() -> Event:
        events.append(Event())
        return events[-1]

    clock = device.Clocked(Launching(), event=event)  # type: ignore[arg-type]
    assert clock.done(clock.latest)
    first, second = (Step(i, (), ()) for i in (1, 2))
    clock.launch(first)
    clock.launch(second)
    assert (clock.latest, clock.done(1), clock.done(2), clock.done(0)) == (2, False, False, True)
    events[0].passed = True
    assert (clock.done(1), clock.done(2)) == (True, False)
    events[1].passed = True
    assert clock.done(clock.latest)


@pytest.mark.parametrize(("start", "stop", "last"), [(0, 24, True), (3, 17, False), (8, 8, False)])
def test_the_devices_digests_are_the_hosts(start: int, stop: int, last: bool) -> None:
    specs = rich_specs(4)
    layout = lay_out(specs, page_tokens=8)
    pool = Pool(
        specs,
        layout=layout,
        num_pages=5,
        num_slots=2,
        device="cpu",
        allocate=lambda n: torch.randint(0, 256, (n,), dtype=torch.uint8),
    )
    fields = (*layout.page_fields, *layout.slot_fields)
    units = (Units(Kind.PAGE, (4, 0, 2), 0, 0, 24), Units(Kind.SLOT, (1,), 0, 0, 24))
    here, there = HostDigests(pool.slabs), DeviceDigests(pool.memory)
    there.warm_up(fields, 8)
    span = {"start": start, "stop": stop, "last": last}
    np.testing.assert_array_equal(
        here.of_fields(fields, units, **span), there.of_fields(fields, units, **span)
    )
    assert here.of_all(fields, units, **span) == there.of_all(fields, units, **span)


class Wire:
    """A transport to whom everything is written at once, over the lane that it is told."""

    name = "nixl"

    def __init__(self, lane: str) -> None:
        self.lane = lane

    def register(self, slabs: Any) -> bytes:
        return b"address"

    def lanes(self) -> dict[str, str]:
        return {"decode.0": self.lane}


SPECS = [StateSpec("kv", 0, Growth.PAGED, 64)]


def _card(name: str, *, gpu: int, host: str = "") -> Card:
    layout = lay_out(SPECS, page_tokens=8)
    slab = Slab(Kind.PAGE, 1 << 40, layout.page_bytes, 4, gpu)
    card = Port(Wire(""), layout=layout, slabs=[slab], engine=name).card  # type: ignore[arg-type]
    return replace_host(card, host)


def replace_host(card: Card, host: str) -> Card:
    import msgspec

    return msgspec.structs.replace(card, host=host) if host else card


def test_only_gpus_of_one_host_have_peer_memory() -> None:
    mine = _card("prefill", gpu=0)
    assert on_one_host(mine, _card("decode", gpu=0))
    assert not on_one_host(mine, _card("decode", gpu=-1))
    assert not on_one_host(mine, _card("decode", gpu=1, host="another"))


@pytest.mark.parametrize(
    ("lane", "slow"),
    [
        ("cuda_ipc/cuda", False),
        ("0..1023: cuda_copy/cuda; 1024..inf: cuda_ipc/cuda", False),
        ("0..1023: cuda_ipc/cuda; 1024..inf: tcp/lo", True),
        ("tcp/lo", True),
        ("cuda_copy/cuda", True),
        ("unknown", False),
        ("", False),
    ],
)
def test_a_lane_that_is_not_peer_memory_is_warned_of(lane: str, slow: bool) -> None:
    why = slow_lane("decode.0", lane)
    assert bool(why) is slow
    assert not slow or ("decode.0" in why and "UCX_TLS" in why)
