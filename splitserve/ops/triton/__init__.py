"""Kernels in Triton, of the same names and signatures as ops/ref, and a few that do two of them at once."""

from splitserve.ops.ref import FUSES, WIDENS, Coded, Weight, prepare, widen

from .attention import (
    DecodePlan,
    PrefillPlan,
    attend_decode,
    attend_prefill,
    plan_decode,
    plan_decode_any,
    plan_prefill,
    write_rows,
)
from .dense import add_rms_norm, embed, linear, rms_norm, swiglu
from .digest import field_digests
from .experts import choose_experts, mix_experts
from .moves import gather_units, scatter_units
from .rope import rope_table, rotate
from .sampling import draw

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
    "draw",
    "embed",
    "field_digests",
    "gather_units",
    "linear",
    "mix_experts",
    "plan_decode",
    "plan_decode_any",
    "plan_prefill",
    "prepare",
    "rms_norm",
    "rope_table",
    "rotate",
    "scatter_units",
    "swiglu",
    "widen",
    "write_rows",
]
