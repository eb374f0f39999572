"""Kernels that start while the one before them ends: programmatic dependent launch, from sm_90 on.

    the kernel before   ████████████████░░░   its last programs
    this one                        ▒▒▒▒▒▒│████████   set-up │ after `follow`

Every kernel of this package calls `follow` before it reads what another kernel wrote, and before it writes: a launch
(ops/kernels/launch.py) may then overlap it with its forerunner. A kernel without the call would read too early, so the
build refuses one. On older architectures, and in the interpreter, it is nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.language.target_info import cuda_capability_geq

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def follow():
    """Wait until the kernel before has ended and its writes are seen; let the next one start to set itself up."""
    if not INTERPRETED and cuda_capability_geq(9, 0):
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def follow_briefly():
    """`follow` for a kernel that takes less time than its successor needs to set itself up: the next may start at once.

    What such a successor reads before its own `follow` must be older than the kernel before this one too.
    """
    if not INTERPRETED and cuda_capability_geq(9, 0):
        gdc_launch_dependents()
        gdc_wait()
