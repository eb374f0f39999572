"""What of DeepSeek-V4's kernels is compiled for float32 on a CPU: many small steps in torch, one loop here.

Twins of ops/ref/v4 by name and signature; all else of a model runs on those, and so do many tokens at once where torch
makes better use of a CPU. Importing this imports numba.
"""

from .dense import grouped_linear, rms_norm, rotate_tail, write_rows
from .experts import expert_ffn, mix_experts
from .hyper import hc_post, hc_pre
from .prepare import prepare
from .quant import dequantise, linear
from .sparse import attend, index_scores

__all__ = [
    "attend",
    "dequantise",
    "expert_ffn",
    "grouped_linear",
    "hc_post",
    "hc_pre",
    "index_scores",
    "linear",
    "mix_experts",
    "prepare",
    "rms_norm",
    "rotate_tail",
    "write_rows",
]
