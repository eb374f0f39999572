"""Limits that a control group sets on this process: cpu quota and memory, of cgroup v1 and v2. Decides nothing."""

from __future__ import annotations

from pathlib import Path

from splitserve.launch.pci import number, text


def cpu_quota(base: Path) -> float:
    """The tightest quota over our cgroup and its parents, in cpus; 0.0 for none."""
    quotas = []
    for v2, path in _cgroups(base, "cpu"):
        if v2:
            words = text(path / "cpu.max").split()
            quota, period = (words[0], words[1]) if len(words) == 2 else ("max", "1")
        else:
            quota, period = (
                text(path / "cpu.cfs_quota_us").strip(),
                text(path / "cpu.cfs_period_us").strip(),
            )
        if quota.isdigit() and period.isdigit() and int(period):
            quotas.append(int(quota) / int(period))
    return min(quotas, default=0.0)


def memory_limit(base: Path) -> tuple[int | None, int]:
    """The tightest limit over our cgroup and its parents, with that group's use; file cache counts as unused."""
    best: tuple[int | None, int] = (None, 0)
    for v2, path in _cgroups(base, "memory"):
        limit = text(path / ("memory.max" if v2 else "memory.limit_in_bytes")).strip()
        if not limit.isdigit() or int(limit) >= 2**60:  # v1 writes "no limit" as a number near 2^63
            continue
        used = number(path / ("memory.current" if v2 else "memory.usage_in_bytes"), 0)
        cache = [
            int(line.split()[1])
            for line in text(path / "memory.stat").splitlines()
            if line.startswith("inactive_file ")
        ]
        used = max(0, used - sum(cache))
        if best[0] is None or int(limit) - used < best[0] - best[1]:
            best = (int(limit), used)
    return best


def _cgroups(base: Path, controller: str) -> list[tuple[bool, Path]]:
    """Directories of our cgroup and its parents for a controller, inner first: (is v2, path).

    Inside a container /proc/self/cgroup may name a path of the host that is not mounted here; the mount's root,
    which is then the container's own group, closes the list.
    """
    mount = base / "sys/fs/cgroup"
    found = []
    for line in text(base / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        v2 = controllers == ""
        if not v2 and controller not in controllers.split(","):
            continue
        top = mount if v2 else mount / controllers
        if not v2 and not top.exists():
            top = mount / controller
        inner = top / path.lstrip("/")
        chain = [inner, *inner.parents]
        found += [(v2, p) for p in chain if p.is_relative_to(top)]
    return found
