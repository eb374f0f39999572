"""Tile sizes, warps and stages of every kernel, as data: one JSON file for each architecture, one for unknown ones.

    data/default.json   {"linear_tiles": [{"upto": 16, "BN": 32, ...}, {"upto": null, ...}], ...}
    data/sm90.json      the same names; what it lacks comes from the default

An entry serves sizes up to `upto` (null: any); what the size is (tokens, mostly) the kernel's launcher says. One with
`triton` serves that version only: where another one's compiler makes worse code of it, the next entry holds.
"""

from __future__ import annotations

import json
from functools import cache, lru_cache
from importlib.resources import files
from typing import Any

from splitserve.errors import ConfigError
from splitserve.ops.kernels.archs import triton_version

DATA = "splitserve.ops.kernels"


def tuned(kernel: str, arch: int, size: int = 1) -> dict[str, Any]:
    """Constants of `kernel` for `size` on `arch`, to keep. Raises ConfigError for a kernel without an entry."""
    return dict(_tuned(kernel, arch, size))


@lru_cache(1 << 14)
def _tuned(kernel: str, arch: int, size: int) -> dict[str, Any]:
    for table in (_table(f"sm{arch}"), _table("default")):
        for entry in table.get(kernel, ()):
            if entry["upto"] is None or size <= entry["upto"]:
                return {k: v for k, v in entry.items() if k not in ("upto", "triton")}
    raise ConfigError(f"no tuned configuration of kernel {kernel!r} for size {size}")


def sizes(kernel: str, arch: int) -> list[int]:
    """One size for each entry of `kernel` on `arch`: all of them are compiled ahead of time."""
    entries = _table(f"sm{arch}").get(kernel) or _table("default").get(kernel, [])
    last = 16
    result = []
    for entry in entries:
        last = last * 4 if entry["upto"] is None else entry["upto"]
        result.append(last)
    return result


@cache
def _table(name: str) -> dict[str, list[dict[str, Any]]]:
    """What is there for the installed Triton."""
    path = files(DATA) / "data" / f"{name}.json"
    table = json.loads(path.read_text()) if path.is_file() else {}
    version = triton_version()
    return {
        k: [e for e in entries if version.startswith(e.get("triton", ""))] for k, entries in table.items()
    }
