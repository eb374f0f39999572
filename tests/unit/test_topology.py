"""Topology read from trees of machines that are not this one."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from splitserve.launch import drawing, pci, topology
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
    text = "\n".join(drawing.draw(topology.read(two_sockets.root, affinity=range(8), nvml=False)))
    for cpu in range(8):
        assert str(cpu) in text
    assert "node 1" in text
    assert "no cpu quota" in text


def test_this_machine_can_be_read():
    t = topology.read()
    assert t.cpus
    assert t.memory_free > 0


def switched(tree: Tree) -> None:
    """Node 0: a root port, a switch with two GPUs and a card behind it, on half its lanes; one port redirects."""
    top = "sys/devices/pci0000:00/0000:00:01.1"
    up = f"{top}/0000:01:00.0"
    ends = {"02:00.0": "03:00.0", "02:01.0": "04:00.0", "02:02.0": "05:00.0"}
    paths = {"00:01.1": top, "01:00.0": up}
    for port, end in ends.items():
        paths[port] = f"{up}/0000:{port}"
        paths[end] = f"{up}/0000:{port}/0000:{end}"
    for short, path in paths.items():
        gpu, nic = short in ("03:00.0", "04:00.0"), short == "05:00.0"
        tree.write(f"{path}/class", "0x030200\n" if gpu else "0x020000\n" if nic else "0x060400\n")
        tree.write(f"{path}/vendor", "0x10de\n" if gpu else "0x15b3\n")
        tree.write(f"{path}/device", "0x2bb1\n")
        tree.write(f"{path}/numa_node", "0\n")
        for name, value in (("speed", "32.0 GT/s PCIe"), ("width", "16")):
            now = "8" if short == "04:00.0" and name == "width" else value
            tree.write(f"{path}/current_link_{name}", f"{now}\n")
            tree.write(f"{path}/max_link_{name}", f"{value}\n")
        link = tree.root / f"sys/bus/pci/devices/0000:{short}"
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(Path("../../../..") / path)
    acs = bytearray(4096)
    acs[0x100:0x108] = (0x000D | 1 << 16).to_bytes(4, "little") + b"\0\0" + (0b100).to_bytes(2, "little")
    (tree.root / paths["02:00.0"] / "config").write_bytes(acs)


def test_the_pci_tree_above_gpus_with_widths_and_acs(two_sockets: Tree):
    switched(two_sockets)
    t = topology.read(two_sockets.root, affinity=range(8), nvml=False)
    kinds = {d.address[5:]: d.kind for d in t.pci}
    assert kinds == {
        "00:01.1": "root port",
        "01:00.0": "switch up",
        "02:00.0": "switch down",
        "02:01.0": "switch down",
        "02:02.0": "switch down",
        "03:00.0": "gpu",
        "04:00.0": "gpu",
        "05:00.0": "nic",
    }
    assert pci.near(t.devices, "0000:03:00.0", "0000:04:00.0") == "switch"
    assert pci.switch_of(t.devices, "0000:03:00.0") == "0000:01:00.0"
    assert pci.redirected(t.devices, "0000:03:00.0") == ("0000:02:00.0",)
    assert t.devices["0000:01:00.0"].acs is None  # not readable is not off
    assert pci.narrowed(t.devices, t.devices["0000:04:00.0"]) == "x8 of x16"
    text = "\n".join(drawing.draw(t))
    assert "NARROW: x8 of x16" in text
    assert "ACS redirects" in text
    assert "NVML tells nothing of it" in text


class FakeNvml:
    """Two GPUs with four NVLinks to one NVSwitch, or none and no peer access, as pynvml would tell of them."""

    class NVMLError(Exception):
        pass

    def __init__(self, *, p2p: int, links: int) -> None:
        self._p2p, self._num_links = p2p, links

    def __getattr__(self, name: str):
        pci_of = [SimpleNamespace(busId=b"00000000:03:00.0"), SimpleNamespace(busId=b"00000000:04:00.0")]
        answers = {
            "nvmlInit": lambda: None,
            "nvmlShutdown": lambda: None,
            "nvmlDeviceGetCount": lambda: 2,
            "nvmlDeviceGetHandleByIndex": lambda i: i,
            "nvmlDeviceGetMemoryInfo": lambda d: SimpleNamespace(total=2 << 30, free=1 << 30),
            "nvmlDeviceGetPciInfo": lambda d: pci_of[d],
            "nvmlDeviceGetName": lambda d: b"GPU",
            "nvmlDeviceGetUUID": lambda d: f"u{d}",
            "nvmlDeviceGetCudaComputeCapability": lambda d: (12, 0),
            "nvmlDeviceGetP2PStatus": lambda a, b, what: self._p2p,
            "nvmlDeviceGetNvLinkState": lambda d, n: int(n < self._num_links),
            "nvmlDeviceGetNvLinkRemoteDeviceType": lambda d, n: 2,
            "nvmlSystemGetDriverVersion": lambda: b"580.1",
            "nvmlSystemGetCudaDriverVersion_v2": lambda: 13000,
        }
        if name not in answers:  # an older library: the question is unknown
            raise AttributeError(name)
        return answers[name]


@pytest.mark.parametrize(
    ("p2p", "links", "way", "told"), [(0, 4, "nvlink", "nvlink4"), (5, 0, "switch", "switch!")]
)
def test_nvlink_and_peer_access(two_sockets: Tree, p2p: int, links: int, way: str, told: str):
    switched(two_sockets)
    t = topology.read(two_sockets.root, affinity=range(8), library=FakeNvml(p2p=p2p, links=links))
    assert (t.driver, t.cuda, t.gpus[1].arch, t.gpus[1].node) == ("580.1", "13.0", 120, 0)
    assert topology.how_near(t, *t.gpus) == way
    text = "\n".join(drawing.draw(t))
    assert told in text
    assert ("no peer access" in text) is (p2p != 0)


def test_a_topology_comes_back_from_its_json(two_sockets: Tree, tmp_path: Path):
    switched(two_sockets)
    t = topology.read(two_sockets.root, affinity=range(8), library=FakeNvml(p2p=0, links=4))
    (tmp_path / "t.json").write_text(json.dumps(t.to_dict()))
    assert topology.load(tmp_path / "t.json") == t
