"""Checks of GPUs and of the ways between them: driver, builds, kernels, peer access, ACS, IOMMU, cuda_ipc. Pure.

Where there are no GPUs each says so and is content: a CPU serves too.
"""

from __future__ import annotations

from splitserve.launch import pci
from splitserve.launch.doctor.facts import Facts
from splitserve.launch.doctor.finding import Verdict, failure, fine, warning
from splitserve.launch.drawing import gib
from splitserve.launch.nvml import GpuPair
from splitserve.launch.topology import Topology, how_near
from splitserve.ops.kernels.archs import ARCHS, kernel_path

_NONE = "no GPU here"
_SETUP = "splitserve doctor --setup --run"
_BUSY_SHARE = 0.1

_PEER_FIXES = {
    "the chipset does not allow it": "put the cards under one root complex or one switch, or turn ACS and the IOMMU's "
    "translation off",
    "this GPU does not support it": "nothing to set: state goes through host memory; expect 10 to 20 GB/s a pair",
    "they meet at an IO hub that does not pass it on": "move the cards to slots of one socket (`splitserve topology`)",
    "a registry key disables it": "remove RMDisableP2P from NVreg_RegistryDwords in /etc/modprobe.d, then reboot",
    "the driver does not support it for this GPU": "NVIDIA's driver keeps peers apart on GeForce: state goes through "
    "host memory; expect 10 to 20 GB/s a pair",
}
"""By the words of nvml.py."""


def driver(facts: Facts) -> Verdict:
    """What NVML tells of; without NVML GPUs can neither be counted nor placed."""
    t = facts.topology
    if t.gpus:
        return fine(f"{t.driver or '?'}, runs CUDA up to {t.cuda or '?'}; {len(t.gpus)} x {t.gpus[0].name}")
    there = [d.address for d in t.pci if d.kind == "gpu"]
    why = t.no_gpus or "NVML tells of none"
    if not there:
        return fine(f"{_NONE} ({why})")
    fix = (
        "pip install nvidia-ml-py"
        if "nvidia-ml-py" in why
        else "load NVIDIA's driver (`nvidia-smi` must answer); docker: --gpus all"
    )
    return warning(f"{len(there)} NVIDIA GPUs on the bus that NVML does not tell of: {why}", fix)


def cuda(facts: Facts) -> Verdict:
    """The driver runs every build of its own major version of CUDA, and older ones."""
    t, built = facts.topology, facts.software.torch_cuda
    if not t.gpus:
        return fine(f"torch is built for {f'CUDA {built}' if built else 'CPUs'}; {_NONE}")
    if not facts.version("torch"):
        return failure("torch is not installed", _SETUP)
    if not built:
        return warning('torch is built for CPUs: device = "cuda" will not start', _SETUP)
    text = f"torch is built for CUDA {built}, the driver runs up to {t.cuda or '?'}"
    if not t.cuda:
        return fine(text)
    ours, most = _version(built), _version(t.cuda)
    if ours[0] > most[0]:
        return failure(text, f"a newer driver (CUDA {ours[0]}), or the build that suits this one: {_SETUP}")
    newest = max(g.arch for g in t.gpus)
    if newest >= 100 and ours < (12, 8):
        return failure(f"{text}; sm_{newest} wants a build for CUDA 12.8 or newer", _SETUP)
    if ours > most:
        return warning(
            f"{text}: it runs, but what the driver must compile itself does not",
            f"a driver that runs CUDA {built}, or the build that suits this one: {_SETUP}",
        )
    return fine(text)


def kernels(facts: Facts) -> Verdict:
    """Which kernels run here: a fallback on a GPU that kernels exist for is a fault."""
    gpus = facts.topology.gpus
    served = [g for g in gpus if g.arch >= min(ARCHS)]
    text = kernel_path([(g.name, g.arch) for g in gpus])
    if served and not facts.version("triton"):
        return failure(text, _SETUP)
    if gpus and not served:
        return warning(text, f'GPUs of sm_{min(ARCHS)} or newer are served; others: device = "cpu"')
    return fine(text)


def gpu_memory(facts: Facts) -> Verdict:
    gpus = facts.topology.gpus
    if not gpus:
        return fine(_NONE)
    busy = [g for g in gpus if g.free < (1 - _BUSY_SHARE) * g.memory]
    if busy:
        text = ", ".join(f"gpu {g.index}: {gib(g.free)} free of {gib(g.memory)}" for g in busy)
        return warning(text, "nvidia-smi shows whose it is; end it, or name other GPUs (gpus = [...])")
    return fine(f"{gib(min(g.free for g in gpus))} free on each of {len(gpus)}")


def links(facts: Facts) -> Verdict:
    """A narrow slot halves what a rank can send. A low speed is no fault: links slow down while they idle."""
    t = facts.topology
    ends = [d for d in t.pci if d.kind in ("gpu", "nic")]
    narrow = [(d, width) for d in ends if (width := pci.narrowed(t.devices, d))]
    if narrow:
        text = ", ".join(f"{d.kind} {d.address}: {width}" for d, width in narrow)
        return warning(text, "reseat the card or move it to a full slot; look for bifurcation in the BIOS")
    return fine(f"each card has all its lanes ({len(ends)} looked at)" if ends else "sysfs shows no card")


def peers(facts: Facts) -> Verdict:
    t = facts.topology
    if len(t.gpus) < 2:
        return fine("fewer than two GPUs")
    told = [p for p in t.pairs if p.p2p != "unknown"]
    if not told:
        return warning("NVML does not say whether GPUs reach each other", "nvidia-smi topo -p2p w")
    apart = [p for p in told if p.p2p != "ok"]
    if not apart:
        by = {g.index: g for g in t.gpus}
        ways = sorted({how_near(t, by[p.a], by[p.b]) for p in told})
        return fine(f"all {len(told)} pairs reach each other ({', '.join(ways)})")
    why = apart[0].p2p
    pairs = ", ".join(f"{p.a}-{p.b}" for p in apart[:6]) + (" ..." if len(apart) > 6 else "")
    return warning(f"{len(apart)} of {len(told)} pairs do not ({pairs}): {why}", _PEER_FIXES.get(why, _SEE))


_SEE = "nvidia-smi topo -p2p w shows what the driver says of each pair"


def acs(facts: Facts) -> Verdict:
    """A bridge that redirects sends the traffic of two neighbours up to the root and back, at half the rate."""
    t = facts.topology
    if not any(d.kind == "gpu" for d in t.pci):
        return fine(_NONE)
    bad = sorted({b for d in t.pci if d.kind == "gpu" for b in pci.redirected(t.devices, d.address)})
    if bad:
        commands = "; ".join(f"sudo setpci -s {b} ECAP_ACS+6.w=0000" for b in bad)
        return warning(
            f"{len(bad)} bridges redirect traffic between GPUs: {', '.join(bad)}",
            f"{commands} (until the next boot; for good: ACS off in the BIOS)",
        )
    bridges = [d for d in t.pci if d.is_bridge]
    if bridges and all(d.acs is None for d in bridges):
        return warning("unknown: the kernel shows it to root only", "sudo splitserve doctor")
    return fine("no bridge redirects traffic between GPUs")


def iommu(facts: Facts) -> Verdict:
    t = facts.topology
    if not t.gpus and not any(d.kind == "gpu" for d in t.pci):
        return fine(f"{t.iommu}; {_NONE}")
    if t.iommu == "translated":
        return warning(
            "translates every address that a GPU writes to: peers are slow, or hang",
            "boot with iommu=pt (GRUB_CMDLINE_LINUX, then update-grub), or turn the IOMMU off in the BIOS",
        )
    return fine(t.iommu)


def cuda_ipc(facts: Facts) -> Verdict:
    """Whether one process may write into another's GPU memory; whether UCX does is what `lanes` shows."""
    t = facts.topology
    if len(t.gpus) < 2:
        return fine("fewer than two GPUs: nothing to send between")
    tls = facts.flag("UCX_TLS")
    if tls and not _allows(tls, "cuda_ipc"):
        return failure(
            f"UCX_TLS={tls} leaves cuda_ipc out: state would go a hundred times slower",
            "unset UCX_TLS, or name cuda_ipc and cuda_copy in it too",
        )
    if "expandable_segments:true" in _torch_allocator(facts).lower():
        return failure(
            "expandable_segments of torch's allocator makes memory that no other process can open",
            "unset PYTORCH_CUDA_ALLOC_CONF (and PYTORCH_ALLOC_CONF), or take expandable_segments out of it",
        )
    if t.pairs and not any(_reach(p) for p in t.pairs):
        return warning("no two GPUs reach each other: UCX takes cuda_copy through host memory", _SEE)
    return fine(f"open to {sum(map(_reach, t.pairs))} of {_num_pairs(t)} pairs")


def _torch_allocator(facts: Facts) -> str:
    return facts.flag("PYTORCH_CUDA_ALLOC_CONF") + facts.flag("PYTORCH_ALLOC_CONF")


def _allows(tls: str, transport: str) -> bool:
    """UCX_TLS names what may be used, or with ^ what may not; "all", "cuda" and "gpu" stand for several."""
    names = tls.lstrip("^").split(",")
    if tls.startswith("^"):
        return transport not in names and "cuda" not in names and "gpu" not in names
    return bool({transport, "all", "cuda", "gpu"} & set(names))


def _reach(pair: GpuPair) -> bool:
    return pair.p2p in ("ok", "unknown")


def _num_pairs(topology: Topology) -> int:
    return len(topology.gpus) * (len(topology.gpus) - 1) // 2


def _version(text: str) -> tuple[int, int]:
    """ "13.0" is (13, 0)."""
    major, _, minor = text.partition(".")
    return int(major or 0), int(minor.partition(".")[0] or 0)
