"""DeepSeek-V4's kernels in Triton: the names of ops/ref/v4, and a few that do two of them at once.

Weights in codes are taken as `prepare` leaves them. Decoding rows is part of the kernels that read them.
"""

from .choosing import choose_entries, choose_located
from .compress import Saves, Windows, plan_saves, plan_windows, pool_windows
from .dense import (
    Table,
    grouped_linear,
    linear_f32,
    multiply_groups,
    rms_norm,
    rms_norm_rotate,
    rope_table,
    rotate_tail,
    round_groups,
)
from .experts import clamped_swiglu, expert_ffn, fuses, mix_experts, mix_onto, route, route_by_token
from .hyper import hc_enter, hc_head, hc_post, hc_pre
from .indexer import index_scores
from .quant import linear, linear_rounded, prepare
from .rows import encode_keys, encode_latents, take_rows, write_keys, write_latents, write_rows
from .singles import absorb
from .sparse import Rows, attend

__all__ = [
    "Rows",
    "Saves",
    "Table",
    "Windows",
    "absorb",
    "attend",
    "choose_entries",
    "choose_located",
    "clamped_swiglu",
    "encode_keys",
    "encode_latents",
    "expert_ffn",
    "fuses",
    "grouped_linear",
    "hc_enter",
    "hc_head",
    "hc_post",
    "hc_pre",
    "index_scores",
    "linear",
    "linear_f32",
    "linear_rounded",
    "mix_experts",
    "mix_onto",
    "multiply_groups",
    "plan_saves",
    "plan_windows",
    "pool_windows",
    "prepare",
    "rms_norm",
    "rms_norm_rotate",
    "rope_table",
    "rotate_tail",
    "round_groups",
    "route",
    "route_by_token",
    "take_rows",
    "write_keys",
    "write_latents",
    "write_rows",
]
