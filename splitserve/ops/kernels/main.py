"""What the command line calls: `splitserve kernels build`, and the one line about kernels in `up` and `doctor`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
import triton

from splitserve.errors import ConfigError
from splitserve.ops.kernels.build import ARCHS, Built, build, missing
from splitserve.ops.kernels.machine_code import SHARED_LIMIT, Code

OPS = Path(__file__).parent.parent


def parse_archs(text: str) -> tuple[int, ...]:
    """ "80,90" -> (80, 90). Raises ConfigError for what is no architecture that kernels are built for."""
    try:
        archs = tuple(int(part) for part in text.split(","))
    except ValueError:
        archs = ()
    unknown = [a for a in archs if a not in SHARED_LIMIT]
    if not archs or unknown:
        known = ",".join(map(str, ARCHS))
        raise ConfigError(
            f"--arch {text}: not a list of architectures", field="arch", fix=f"for instance --arch {known}"
        )
    return archs


def build_command(archs: Sequence[int] = ARCHS, *, cache: Path, jobs: int | None = None) -> tuple[str, int]:
    """Compile all kernels for `archs` into `cache`. (what to print, exit code): 1 where a kernel has a problem."""
    built = build(archs, cache=cache, jobs=jobs)
    absent = missing(built, archs)
    lines = [
        report(built),
        f"{len(built)} forms of kernels are in {cache}; start engines with TRITON_CACHE_DIR={cache}",
    ]
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


def summary() -> str:
    """One line on the GPU at hand: which kernels run on it, and whether their tiles were tuned for it."""
    if not torch.cuda.is_available():
        return "kernels: plain torch, no CUDA device"
    major, minor = torch.cuda.get_device_capability()
    arch = 10 * major + minor
    name = torch.cuda.get_device_name()
    if arch < min(ARCHS):
        return f"kernels: plain torch, {name} is sm_{arch} and kernels need sm_{min(ARCHS)}"
    tuned_for = (OPS / "kernels" / "data" / f"sm{arch}.json").is_file()
    eight = "e4m3 products" if arch >= 89 else "bf16 products of e4m3 numbers"
    tiles = f"tiles tuned on sm_{arch}" if tuned_for else "default tiles (see `splitserve bench ops`)"
    return f"kernels: Triton {triton.__version__} on {name} (sm_{arch}), {eight}, {tiles}"


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
