"""What the assembler made of a kernel: registers, memory that registers spilled to, tensor-core instructions."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import triton

_TENSOR = re.compile(r"\b(?:UTC[A-Z]*MMA|[HQIOD]G?MMA)[.\w]*")
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")


@dataclass(frozen=True)
class Code:
    registers: int  # of a thread
    spilled: int  # bytes of local memory of a thread
    tensor: tuple[str, ...]  # kinds of matrix instructions, of kernels that multiply matrices


def inspect(cubin: bytes, *, is_matrix: bool) -> Code:
    """Raises OSError where the tools that come with Triton are missing, ValueError where their output is another."""
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "kernel.cubin"
        path.write_bytes(cubin)
        usage = _run(triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(path))
        found = _USAGE.search(usage)
        if found is None:
            raise ValueError(f"cuobjdump says nothing of registers: {usage[:200]}")
        registers, stack, local = map(int, found.groups())
        text = _run(triton.knobs.nvidia.nvdisasm.path, "-c", str(path)) if is_matrix else ""
    return Code(registers, stack + local, tuple(sorted({m.split(".")[0] for m in _TENSOR.findall(text)})))


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr
