"""Kernels that start while the one before them ends: programmatic dependent launch, from sm_90 on.

    the kernel before   ████████████████░░░   its last programs
    this one                        ▒▒▒▒▒▒│████████   set-up, weights on their way into the L2 cache │ after `follow`

Every kernel of this package calls `follow` before it reads what another kernel wrote, and before it writes: a launch
(ops/kernels/launch.py) may then overlap it with its forerunner. A kernel without the call would read too early, so the
build refuses one. On older architectures, and in the interpreter, both functions are nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.language.target_info import cuda_capability_geq

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
LINE = tl.constexpr(128)  # bytes of the L2 cache that come together


@triton.jit
def follow():
    """Wait until the kernel before has ended and its writes are seen; let the next one start to set itself up."""
    if not INTERPRETED and cuda_capability_geq(9, 0):
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def fetch_ahead(
    starts,  # [n] pointers to what no kernel writes while this one may run: weights
    size,  # bytes behind each
    LINES: tl.constexpr,  # a power of two; 0: none
):
    """Bring up to LINES x 128 bytes behind each pointer into the L2 cache, without waiting for them."""
    if LINES > 0 and not INTERPRETED and cuda_capability_geq(9, 0):
        at = (
            starts.to(tl.int64)[:, None]
            + tl.minimum(tl.arange(0, LINES) * LINE, tl.maximum(size, 1) - 1)[None, :]
        )
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
        )
