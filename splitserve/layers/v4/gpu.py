"""The names of kernels.py for bf16 on a GPU: Triton's kernels, several of kernels.py's steps in one of them."""

from __future__ import annotations

from splitserve.ops.triton import v4


class GpuKernels:
    """Functions of ops/triton/v4 by the names that layers use."""

    absorb = staticmethod(v4.absorb)
    attend = staticmethod(v4.attend)
    choose_located = staticmethod(v4.choose_located)
    encode_latents = staticmethod(v4.encode_latents)
    grouped_linear = staticmethod(v4.grouped_linear)
    hc_head = staticmethod(v4.hc_head)
    hc_post = staticmethod(v4.hc_post)
    hc_pre = staticmethod(v4.hc_pre)
    index_scores = staticmethod(v4.index_scores)
    linear = staticmethod(v4.linear)
    linear_f32 = staticmethod(v4.linear_f32)
    mix_with_shared = staticmethod(v4.mix_with_shared)
    pool_windows = staticmethod(v4.pool_windows)
    prepare = staticmethod(v4.prepare)
    rms_norm = staticmethod(v4.rms_norm)
    rms_norm_rotate = staticmethod(v4.rms_norm_rotate)
    rotate_tail = staticmethod(v4.rotate_tail)
    route = staticmethod(v4.route)
    route_by_token = staticmethod(v4.route_by_token)
    write_keys = staticmethod(v4.write_keys)
    write_latents = staticmethod(v4.write_latents)
    write_rows = staticmethod(v4.write_rows)
