"""Checks of the machine without its GPUs: cores, memory, disks, limits, clock, ports. Pure."""

from __future__ import annotations

from splitserve.launch.doctor.facts import UNLIMITED, Facts
from splitserve.launch.doctor.finding import Verdict, failure, fine, warning
from splitserve.launch.drawing import gib
from splitserve.numa import short_list

_GIB = 1 << 30
_MIN_MEMORY = 2 * _GIB
_FEW_SHM = 64 << 20
_GOOD_SHM = 1 * _GIB
_FEW_FILES, _GOOD_FILES = 1024, 8192
_FEW_DISK, _GOOD_DISK = 256 << 20, 2 * _GIB
_MOST_CLOCK_ERROR_S = 0.1
_IDLE_HUGE_SHARE = 0.05


def cpus(facts: Facts) -> Verdict:
    t = facts.topology
    quota = f", quota {t.cpu_quota:g}" if t.cpu_quota else ""
    text = f"{len(t.cores)} cores, cpus {short_list(t.cpus)}{quota}"
    if len(t.cores) < 2 or 0 < t.cpu_quota < 2:
        fix = (
            "a pair wants two cores; on one, prefill and decode take turns. Give more (taskset, docker --cpuset-cpus "
            "and --cpus, cpu.max of the cgroup), or use [unified]"
        )
        return warning(text, fix)
    if 0 < t.cpu_quota < len(t.cores):
        fix = "placement counts the quota as that many cores; raise it (docker --cpus, cpu.max) to use the others"
        return warning(text, fix)
    return fine(text)


def memory(facts: Facts) -> Verdict:
    t = facts.topology
    text = f"{gib(t.memory_free)} free of {gib(t.memory_total)}"
    if t.memory_free < _MIN_MEMORY:
        return failure(
            text, "free some (`ps aux --sort -rss | head`), or raise memory.max of the cgroup: 2 GiB at least"
        )
    return fine(text)


def huge_pages(facts: Facts) -> Verdict:
    """Large pages spare the address tables of weights that are read at each step; reserved ones are lost to others."""
    huge = facts.huge
    text = f"transparent: {huge.transparent or 'none'}, reserved: {huge.reserved} of {huge.size >> 20} MiB"
    idle = huge.free * huge.size
    if idle > _IDLE_HUGE_SHARE * facts.topology.memory_total:
        fix = f"{gib(idle)} are reserved, and nothing here uses them: sudo sysctl vm.nr_hugepages=0"
        return warning(text, fix)
    if huge.transparent == "never":
        fix = "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled"
        return warning(text, fix)
    return fine(text)


def shared_memory(facts: Facts) -> Verdict:
    free = facts.topology.shm_free
    text = f"/dev/shm has {free >> 20} MiB free"
    fix = "docker: --shm-size=1g or --ipc=host; a host: sudo mount -o remount,size=8g /dev/shm"
    if free < _FEW_SHM:
        return failure(f"{text}; UCX keeps its queues there", fix)
    return fine(text) if free >= _GOOD_SHM else warning(text, fix)


def locked_memory(facts: Facts) -> Verdict:
    """RDMA cards pin what they are registered for; between processes of one host nothing is pinned that counts."""
    limit = facts.limits.locked
    text = "no limit" if limit == UNLIMITED else f"at most {limit >> 20} MiB"
    cards = [n.rdma for n in facts.topology.nics if n.rdma]
    if not cards:
        return fine(f"{text}; no RDMA card here needs any")
    if limit != UNLIMITED and limit < facts.topology.memory_total // 2:
        fix = "ulimit -l unlimited; docker: --ulimit memlock=-1; systemd: LimitMEMLOCK=infinity"
        return failure(f"{text}, and {', '.join(cards)} must lock the state it sends", fix)
    return fine(text)


def open_files(facts: Facts) -> Verdict:
    limits = facts.limits
    text = f"at most {limits.files if limits.files != UNLIMITED else 'any number'}"
    if limits.files == UNLIMITED or limits.files >= _GOOD_FILES:
        return fine(text)
    can = limits.files_most == UNLIMITED or limits.files_most >= _GOOD_FILES
    fix = f"ulimit -n {_GOOD_FILES * 8 if limits.files_most == UNLIMITED else limits.files_most}"
    if not can:
        fix = "docker: --ulimit nofile=65536; systemd: LimitNOFILE=65536; a login: /etc/security/limits.conf"
    if limits.files < _FEW_FILES:
        return failure(text, fix)
    return warning(f"{text}: every connection of a client is one", fix)


def disk(facts: Facts) -> Verdict:
    """Each place that a deployment writes to; the worst is told."""
    closed = [d for d in facts.disks if not d.writable]
    if closed:
        return failure(
            f"{closed[0].use} {closed[0].path} cannot be written",
            "set XDG_RUNTIME_DIR (run directory) or TMPDIR to a directory of yours",
        )
    text = ", ".join(f"{d.use} {d.path}: {gib(d.free)} free" for d in facts.disks)
    tight = min(facts.disks, key=lambda d: d.free, default=None)
    if tight is not None and tight.free < _GOOD_DISK:
        fix = f"free some on the disk of {tight.path} (`du -xh {tight.path} | sort -h | tail`), or set another place"
        return (failure if tight.free < _FEW_DISK else warning)(text, fix)
    return fine(text)


def clock(facts: Facts) -> Verdict:
    """Nothing that is served depends on it; logs and traces of several hosts do, and certificates."""
    found = facts.clock
    if not found.known:
        return fine("the kernel does not say (a container may not ask)")
    if not found.synchronised:
        return warning(
            "not synchronised: times in the logs of several hosts cannot be compared",
            "timedatectl set-ntp true, or start chrony; in a VM the host's clock may do (`chronyc tracking`)",
        )
    text = f"synchronised, off by at most {found.error_s * 1000:.0f} ms"
    if found.error_s > _MOST_CLOCK_ERROR_S:
        return warning(
            text, "`chronyc tracking` or `timedatectl timesync-status` show the source; use a nearer one"
        )
    return fine(text)


def ports(facts: Facts) -> Verdict:
    mine = facts.plan.name if facts.plan else ""
    own = [p for p in facts.ports if p.trouble and p.holder and p.holder == (mine or p.holder)]
    taken = [p for p in facts.ports if p.trouble and p not in own]
    if taken:
        up = next((p.holder for p in taken if p.holder), "")
        fix = f"`splitserve down {up}`, which is up and has it; or another port" if up else taken[0].fix
        return failure("; ".join(p.trouble for p in taken), fix)
    if own:
        held = ", ".join(f"{p.port} ({p.name})" for p in own)
        return fine(f"deployment {own[0].holder} is up and has {held}")
    if not facts.ports:
        return fine("the file names none: free ones are taken")
    low, high = facts.ephemeral
    loose = [p for p in facts.ports if low <= p.port <= high]
    text = ", ".join(f"{p.port} ({p.name})" for p in facts.ports) + " free"
    if loose:
        fix = f"sudo sysctl net.ipv4.ip_local_reserved_ports={','.join(str(p.port) for p in loose)}"
        return warning(f"{text}; the kernel may give {loose[0].port} to any program ({low}-{high})", fix)
    return fine(text)
