"""The kernels in plain torch, for any device: what a faster twin must equal. No state, no scheduling."""

from collections.abc import Callable

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
from .coded import Coded, Weight, widen
from .dense import add_rms_norm, embed, linear, rms_norm, swiglu
from .experts import choose_experts, mix_experts
from .rope import rope_table, rotate

WIDENS = False
"""Whether matrices are best left as a checkpoint has them (f16, bf16, coded) and widened by the kernels."""

FUSES = False
"""Whether there is a module `decoder`, which runs a whole layer in two calls."""

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
    "plan_decode_any",
    "plan_prefill",
    "prepare",
    "rms_norm",
    "rope_table",
    "rotate",
    "swiglu",
    "widen",
    "write_rows",
]


def prepare(progress: Callable[[float], None]) -> None:
    """Nothing to compile here."""
    progress(1.0)
