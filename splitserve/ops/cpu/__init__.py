"""The kernels for float32 on a CPU, compiled where they run: twins of ops/ref, at the speed of memory.

Importing this imports numba; nothing else does.
"""

from splitserve.ops.ref import Coded, Weight, choose_experts, mix_experts, widen

from . import decoder as decoder
from .attention import (
    DecodePlan,
    PrefillPlan,
    attend_decode,
    attend_prefill,
    plan_decode,
    plan_prefill,
    write_rows,
)
from .dense import add_rms_norm, embed, linear, rms_norm, swiglu
from .prepare import prepare
from .rope import rope_table, rotate

WIDENS = True
"""Whether matrices are best left as a checkpoint has them (f16, bf16, coded) and widened by the kernels."""

FUSES = True
"""Whether there is `decoder`, which runs a whole layer in two calls."""

__all__ = [
    "FUSES",
    "WIDENS",
    "Coded",
    "DecodePlan",
    "PrefillPlan",
    "Weight",
    "add_rms_norm",
    "attend_decode",
    "attend_prefill",
    "choose_experts",
    "embed",
    "linear",
    "mix_experts",
    "plan_decode",
    "plan_prefill",
    "prepare",
    "rms_norm",
    "rope_table",
    "rotate",
    "swiglu",
    "widen",
    "write_rows",
]
