"""Topology read from trees of machines that are not this one."""

from __future__ import annotations

from pathlib import Path

import pytest

from splitserve.launch import topology
from splitserve.numa import parse_list


class Tree:
    """A fake root directory, written file by file."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def cpu(self, cpu: int, *, socket: int, core: int, siblings: str) -> None:
        where = f"sys/devices/system/cpu/cpu{cpu}/topology"
        self.write(f"{where}/physical_package_id", f"{socket}\n")
        self.write(f"{where}/core_id", f"{core}\n")
        self.write(f"{where}/thread_siblings_list", f"{siblings}\n")

    def node(self, node: int, cpus: str, total_kb: int, free_kb: int) -> None:
        where = f"sys/devices/system/node/node{node}"
        self.write(f"{where}/cpulist", f"{cpus}\n")
        lines = f"Node {node} MemTotal: {total_kb} kB\nNode {node} MemFree: {free_kb} kB\n"
        self.write(f"{where}/meminfo", lines)

    def memory(self, total_kb: int, available_kb: int) -> None:
        self.write(
            "proc/meminfo", f"MemTotal: {total_kb} kB\nMemFree: 1 kB\nMemAvailable: {available_kb} kB\n"
        )


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


@pytest.fixture
def two_sockets(tree: Tree) -> Tree:
    """2 sockets x 2 cores x 2 threads; siblings are n and n + 4; core ids repeat on each socket."""
    for cpu in range(8):
        socket, core = (cpu % 4) // 2, cpu % 2
        tree.cpu(cpu, socket=socket, core=core, siblings=f"{cpu % 4},{cpu % 4 + 4}")
    tree.node(0, "0-1,4-5", 1000, 400)
    tree.node(1, "2-3,6-7", 2000, 900)
    tree.memory(3000, 1500)
    return tree


def test_cores_of_two_sockets_with_hyperthreads(two_sockets: Tree):
    t = topology.read(two_sockets.root, affinity=range(8), nvml=False)
    assert [(c.node, c.socket, c.core, c.cpus) for c in t.cores] == [
        (0, 0, 0, (0, 4)),
        (0, 0, 1, (1, 5)),
        (1, 1, 0, (2, 6)),
        (1, 1, 1, (3, 7)),
    ]
    assert [(n.node, n.total, n.free) for n in t.nodes] == [(0, 1024000, 409600), (1, 2048000, 921600)]
    assert (t.memory_total, t.memory_free) == (3000 * 1024, 1500 * 1024)


def test_only_the_cpus_of_the_affinity_count(two_sockets: Tree):
    t = topology.read(two_sockets.root, affinity=[1, 6], nvml=False)
    assert [c.cpus for c in t.cores] == [(1,), (6,)]
    assert t.cpus == (1, 6)


def test_without_sysfs_each_cpu_is_a_core(tree: Tree):
    tree.memory(1000, 500)
    t = topology.read(tree.root, affinity=[0, 3], nvml=False)
    assert [(c.node, c.cpus) for c in t.cores] == [(0, (0,)), (0, (3,))]
    assert [(n.node, n.free) for n in t.nodes] == [(0, 500 * 1024)]


def test_limits_of_cgroup_v2_and_its_parents(tree: Tree):
    tree.memory(10_000_000, 9_000_000)
    tree.write("proc/self/cgroup", "0::/a/b\n")
    tree.write("sys/fs/cgroup/a/b/cpu.max", "max 100000\n")
    tree.write("sys/fs/cgroup/a/cpu.max", "250000 100000\n")
    tree.write("sys/fs/cgroup/a/memory.max", "1000000\n")
    tree.write("sys/fs/cgroup/a/memory.current", "700000\n")
    tree.write("sys/fs/cgroup/a/memory.stat", "anon 1\ninactive_file 200000\n")
    t = topology.read(tree.root, affinity=[0], nvml=False)
    assert t.cpu_quota == 2.5
    assert (t.memory_total, t.memory_free) == (1_000_000, 500_000)


def test_limits_of_cgroup_v1_in_a_container_that_sees_its_own_root(tree: Tree):
    """The path in /proc/self/cgroup is the host's and not mounted here; the mount's root holds the limits."""
    tree.memory(10_000_000, 9_000_000)
    tree.write("proc/self/cgroup", "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n")
    tree.write("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "150000\n")
    tree.write("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n")
    tree.write("sys/fs/cgroup/memory/memory.limit_in_bytes", "2000000\n")
    tree.write("sys/fs/cgroup/memory/memory.usage_in_bytes", "500000\n")
    t = topology.read(tree.root, affinity=[0], nvml=False)
    assert t.cpu_quota == 1.5
    assert t.memory_free == 1_500_000


def test_no_limit_of_cgroup_v1_is_no_limit(tree: Tree):
    tree.memory(1000, 900)
    tree.write("proc/self/cgroup", "4:memory:/\n3:cpu:/\n")
    tree.write("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n")
    tree.write("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n")
    tree.write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    t = topology.read(tree.root, affinity=[0], nvml=False)
    assert t.cpu_quota == 0.0
    assert t.memory_total == 1000 * 1024


@pytest.mark.parametrize(("text", "cpus"), [("", []), ("3\n", [3]), ("0-2,5", [0, 1, 2, 5]), ("7,1", [7, 1])])
def test_cpulists(text: str, cpus: list[int]):
    assert parse_list(text) == cpus


def test_the_drawing_names_every_cpu_and_limit(two_sockets: Tree):
    text = "\n".join(topology.draw(topology.read(two_sockets.root, affinity=range(8), nvml=False)))
    for cpu in range(8):
        assert str(cpu) in text
    assert "node 1" in text
    assert "no cpu quota" in text


def test_this_machine_can_be_read():
    t = topology.read()
    assert t.cpus
    assert t.memory_free > 0
