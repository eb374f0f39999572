"""What `splitserve kernels build` does: compile the catalogue, say what came of it, remember it for the gate."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

import triton

from splitserve.ops.kernels.archs import ARCHS
from splitserve.ops.kernels.build import Built, build, missing
from splitserve.ops.kernels.machine_code import Code

OPS = Path(__file__).parent.parent


def build_command(
    archs: Sequence[int] = ARCHS,
    *,
    cache: Path | None = None,  # Triton's own, if not given
    jobs: int | None = None,
    quick: bool = False,
    into: Path | None = None,  # what was found, as JSON
) -> tuple[str, int]:
    """Compile the kernels for `archs` into `cache`. (what to print, exit code): 1 where a kernel has a problem."""
    built = build(archs, cache=cache, jobs=jobs, quick=quick)
    if into is not None:
        write_built(into, built)
    absent = missing(built, archs)
    place = (
        f"{cache}; start engines with TRITON_CACHE_DIR={cache}"
        if cache
        else f"{triton.knobs.cache.dir}, where engines look"
    )
    lines = [report(built), f"{len(built)} forms of kernels are in {place}"]
    lines += [f"missing: {name}" for name in absent]
    return "\n".join(lines), 1 if absent or any(b.problem for b in built) else 0


def report(built: Iterable[Built]) -> str:
    """A line for each kernel: forms, most registers and shared memory, matrix instructions; then what is wrong."""
    built = list(built)
    lines = ["kernel            forms  registers  shared KiB  matrix instructions"]
    for name in sorted({b.kernel for b in built}):
        mine = [b for b in built if b.kernel == name]
        tensor = sorted({t for b in mine for t in b.code.tensor})
        lines.append(
            f"{name:17} {len(mine):5}  {max(b.code.registers for b in mine):9}  "
            f"{max(b.shared for b in mine) / 1024:10.1f}  {' '.join(tensor)}"
        )
    lines += [f"sm_{b.arch} {b.kernel}: {b.problem} ({b.constants})" for b in built if b.problem]
    return "\n".join(lines)


def sources_digest() -> str:
    """Changes when a kernel, its tiles or Triton changes: what a remembered build is good for."""
    digest = hashlib.blake2b(triton.__version__.encode(), digest_size=16)
    for path in sorted(
        [*OPS.glob("triton/**/*.py"), *OPS.glob("kernels/*.py"), *OPS.glob("kernels/data/*.json")]
    ):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def write_built(path: Path, built: Iterable[Built]) -> None:
    """As JSON, to be read by `read_built`."""
    path.write_text(json.dumps([asdict(b) for b in built]))


def read_built(path: Path) -> list[Built]:
    rows = json.loads(path.read_text())
    for row in rows:
        code = row["code"]
        row["code"] = Code(code["registers"], code["spilled"], tuple(code["tensor"]))
    return [Built(**row) for row in rows]
