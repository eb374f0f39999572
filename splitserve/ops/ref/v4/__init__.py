"""DeepSeek-V4's kernels in plain torch, for any device: what a faster twin must equal. No state, no scheduling."""

from .compress import CSA, Saves, Windows, plan_saves, plan_windows, pool_windows
from .dense import Table, grouped_linear, linear_f32, rms_norm, rope_table, rotate_tail
from .experts import clamped_swiglu, expert_ffn, mix_experts, route, route_by_token
from .hyper import hc_head, hc_post, hc_pre
from .indexer import Places, choose_entries, index_scores, locate_entries
from .quant import (
    Mxfp4,
    Tiles,
    Weight,
    dequantise,
    dequantise_mxfp4,
    dequantise_tiles,
    linear,
    quantise_mxfp4,
    quantise_tiles,
    ue8m0_to_float,
)
from .rows import decode_keys, decode_latents, encode_keys, encode_latents, take_rows, write_rows
from .singles import Gate, Singles, Store, absorb, entry_positions, windows_of_singles
from .sparse import Reach, Rows, attend

__all__ = [
    "CSA",
    "Gate",
    "Mxfp4",
    "Places",
    "Reach",
    "Rows",
    "Saves",
    "Singles",
    "Store",
    "Table",
    "Tiles",
    "Weight",
    "Windows",
    "absorb",
    "attend",
    "choose_entries",
    "clamped_swiglu",
    "decode_keys",
    "decode_latents",
    "dequantise",
    "dequantise_mxfp4",
    "dequantise_tiles",
    "encode_keys",
    "encode_latents",
    "entry_positions",
    "expert_ffn",
    "grouped_linear",
    "hc_head",
    "hc_post",
    "hc_pre",
    "index_scores",
    "linear",
    "linear_f32",
    "locate_entries",
    "mix_experts",
    "plan_saves",
    "plan_windows",
    "pool_windows",
    "quantise_mxfp4",
    "quantise_tiles",
    "rms_norm",
    "rope_table",
    "rotate_tail",
    "route",
    "route_by_token",
    "take_rows",
    "ue8m0_to_float",
    "windows_of_singles",
    "write_rows",
]
