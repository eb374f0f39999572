"""Big machines put together by hand: how they are drawn, how deployments are placed on them, what the doctor says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from doctor_facts import LAPTOP

from splitserve.launch import drawing, pci, topology
from splitserve.launch.deployment import load
from splitserve.launch.doctor import examine
from splitserve.launch.doctor.finding import Level
from splitserve.launch.doctor.setup import choose
from splitserve.launch.placement import place
from splitserve.launch.procs import ProcSpec
from splitserve.launch.topology import Topology, how_near
from splitserve.numa import share_of
from tests.machines import DIRECTORY, MACHINES, written

DEPLOY = Path(__file__).parents[2] / "deploy"
BOX = str(DEPLOY / "rtx-pro-6000-x8.toml")


def read(name: str) -> Topology:
    return topology.load(DIRECTORY / f"{name}.json")


def placed(machine: Topology, file: str, *words: str) -> list[ProcSpec]:
    return place(machine, load(file, overrides=list(words), environ={}))


@pytest.mark.parametrize("name", MACHINES)
def test_the_files_are_as_they_would_be_written(name: str):
    assert (DIRECTORY / f"{name}.json").read_text() == written(name), "run python -m tests.machines"
    assert read(name) == MACHINES[name]()


@pytest.mark.parametrize(
    ("name", "switches", "ways", "says"),
    [
        (
            "rtx-pro-6000-x8",
            0,
            {"node": 12, "across": 16},
            "nic eno1 ethernet 10 Gbit/s up, bus 0000:41:00.0",
        ),
        (
            "rtx-pro-6000-x8-switches",
            4,
            {"switch": 4, "node": 8, "across": 16},
            "switch 0000:01:00.0, ACS redirects",
        ),
        ("rtx-4090-x4", 0, {"node!": 2, "across!": 4}, "! no peer access: the driver does not support it"),
        ("dgx-h100", 8, {"nvlink18": 28}, "nic mlx5_7 infiniband 400 Gbit/s up, bus 0000:e0:00.0"),
    ],
)
def test_a_drawing_has_every_card_where_it_hangs_and_every_way(
    name: str, switches: int, ways: dict[str, int], says: str
):
    machine = read(name)
    text = "\n".join(drawing.draw(machine))
    tree, _, matrix = text.partition("between GPUs")
    for gpu in machine.gpus:
        assert tree.count(f"gpu {gpu.index} {gpu.name}") == 1
    assert tree.count("─ switch 0000:") == switches
    assert says in text
    cells = [cell for line in matrix.splitlines()[1 : len(machine.gpus) + 1] for cell in line.split()[1:]]
    assert {way: cells.count(way) for way in {*cells} - {"-"}} == {way: 2 * n for way, n in ways.items()}


@pytest.mark.parametrize("name", ["rtx-pro-6000-x8", "rtx-pro-6000-x8-switches", "dgx-h100"])
def test_a_pair_of_four_takes_a_half_of_the_box_each(name: str):
    machine = read(name)
    prefill, decode, _ = placed(machine, BOX)
    assert (sorted(prefill.gpus), sorted(decode.gpus)) == ([0, 1, 2, 3], [4, 5, 6, 7])
    assert (prefill.memory, decode.memory) == ("bind:0", "bind:1")
    for spec, node in ((prefill, 0), (decode, 1)):
        assert {c.node for c in machine.cores if set(c.cpus) & set(spec.cpus)} == {node}
    assert not set(prefill.cpus) & set(decode.cpus)


def test_engines_of_two_share_a_switch_where_there_are_switches():
    machine = read("rtx-pro-6000-x8-switches")
    *engines, _ = placed(machine, str(DEPLOY / "rtx-pro-6000-x8-2p2d.toml"))
    by = {g.index: g for g in machine.gpus}
    assert [how_near(machine, *(by[i] for i in e.gpus)) for e in engines] == ["switch"] * 4


@pytest.mark.parametrize("name", ["rtx-pro-6000-x8", "rtx-pro-6000-x8-switches"])
def test_ranks_over_both_halves_compute_beside_their_cards(name: str):
    machine = read(name)
    engine, _ = placed(machine, str(DEPLOY / "rtx-pro-6000-x8-tp8.toml"))
    for rank, index in enumerate(engine.gpus):
        node = next(g.node for g in machine.gpus if g.index == index)
        cpus = share_of(engine.cpus, rank, 8)
        assert {c.node for c in machine.cores if set(c.cpus) & set(cpus)} == {node}


def test_four_geforce_make_a_pair_of_two():
    machine = read("rtx-4090-x4")
    *engines, _ = placed(
        machine, BOX, "engine.tp=2", "prefill.gpus=0,1", "decode.gpus=2,3", "prefill.node=0", "decode.node=1"
    )
    assert [(e.gpus, e.memory) for e in engines] == [((0, 1), "bind:0"), ((2, 3), "bind:1")]


def test_each_card_of_the_dgx_has_its_network_card_on_its_switch():
    machine = read("dgx-h100")
    for gpu, nic in zip(machine.gpus, sorted(machine.nics, key=lambda n: n.address), strict=True):
        assert pci.near(machine.devices, gpu.address, nic.address) == "switch"


def test_a_machine_that_was_recorded_is_drawn_and_placed_on():
    """As `splitserve topology --json` wrote it on a virtual machine with one H200, whose node is not told."""
    machine = read("h200-x1-recorded")
    lines = drawing.draw(machine)
    assert any(
        "gpu 0 NVIDIA H200, 139.8 GiB free of 140.4 GiB" in line and "32 GT/s x16" in line for line in lines
    )
    engine, _ = placed(machine, str(DEPLOY / "v4-flash-tp4.toml"), "unified.tp=1")
    assert (engine.gpus, engine.cpus) == ((0,), tuple(range(15)))
    assert choose(machine, LAPTOP.software).build == "cu130"


@pytest.mark.parametrize(
    ("name", "complaints", "build"),
    [
        ("rtx-pro-6000-x8", set(), "cu130"),
        ("rtx-pro-6000-x8-switches", {"acs"}, "cu130"),
        ("rtx-4090-x4", {"peers", "cuda_ipc"}, "cu126"),
        ("dgx-h100", {"memlock"}, "cu130"),
    ],
)
def test_the_doctor_complains_of_what_such_boxes_come_with(name: str, complaints: set[str], build: str):
    machine = read(name)
    chosen = choose(machine, LAPTOP.software)
    cuda = {"cu130": "13.0", "cu126": "12.6"}[chosen.build]
    packages = {**LAPTOP.software.packages, f"nixl-cu{cuda[:2]}": "1.5.1"}
    facts = replace(
        LAPTOP, topology=machine, software=replace(LAPTOP.software, packages=packages, torch_cuda=cuda)
    )
    told = {f.subject for f in examine(facts) if f.level not in (Level.OK, Level.SKIPPED)}
    assert (chosen.build, told) == (build, complaints)
