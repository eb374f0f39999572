"""What of DeepSeek-V4's kernels is compiled for float32 on a CPU: many small steps in torch, one loop here.

Twins of ops/ref/v4 by name and signature; all else of a model runs on those. Importing this imports numba.
"""

from .dense import rms_norm, rotate_tail
from .experts import expert_ffn, mix_experts
from .hyper import hc_pre
from .quant import dequantise, linear

__all__ = ["dequantise", "expert_ffn", "hc_pre", "linear", "mix_experts", "rms_norm", "rotate_tail"]
