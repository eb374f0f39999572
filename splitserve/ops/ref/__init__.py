"""The kernels in plain torch, for any device: what a faster twin must equal. No state, no scheduling."""

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
from .experts import choose_experts, mix_experts
from .rope import rope_table, rotate

__all__ = [
    "DecodePlan",
    "PrefillPlan",
    "add_rms_norm",
    "attend_decode",
    "attend_prefill",
    "choose_experts",
    "embed",
    "linear",
    "mix_experts",
    "plan_decode",
    "plan_prefill",
    "rms_norm",
    "rope_table",
    "rotate",
    "swiglu",
    "write_rows",
]
