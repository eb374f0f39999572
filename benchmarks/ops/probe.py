"""What the GPU at hand can do at best: copies, matrix products and the cost of a kernel that does nothing.

python benchmarks/ops/probe.py
"""

from __future__ import annotations

import subprocess

import torch
import triton
import triton.language as tl

from splitserve.ops.bench.timing import time_calls


@triton.jit
def nothing(x):
    pass


@triton.jit
def move(x, y, n, READ_ONLY: tl.constexpr, BD: tl.constexpr):
    # grid: [ceil(n / BD)]
    at = tl.program_id(0).to(tl.int64) * BD + tl.arange(0, BD)
    value = tl.load(x + at, mask=at < n)
    if READ_ONLY:
        tl.store(y + tl.program_id(0), tl.sum(value, 0))
    else:
        tl.store(y + at, value, mask=at < n)


def main() -> None:
    print(torch.cuda.get_device_name(), torch.__version__, triton.__version__)
    for size in (1 << 22, 1 << 23, 1 << 24, 1 << 28, 1 << 30):  # numbers of 4 bytes
        copies = max(1, (1 << 27) // size)
        xs = [torch.randint(0, 1 << 30, (size,), dtype=torch.int32, device="cuda") for _ in range(copies)]
        y = torch.empty_like(xs[0])
        line = f"{size * 4 / 1e6:.0f} MB:"
        for read_only, bd in ((True, 4096), (True, 16384), (False, 4096)):
            t = time_calls([lambda x=x: move[(size // bd,)](x, y, size, READ_ONLY=read_only, BD=bd, num_warps=8)
                            for x in xs])  # fmt: skip
            line += f"  {'read' if read_only else 'copy'} {bd}: {size * (4 if read_only else 8) / t.us / 1e6:.2f} TB/s"
        t = time_calls([lambda x=x: y.copy_(x) for x in xs])
        print(line, f" copy_: {size * 8 / t.us / 1e6:.2f} TB/s", flush=True)
        del xs, y
    print(subprocess.run(["nvidia-smi", "--query-gpu=clocks.sm,clocks.mem,clocks_throttle_reasons.active,power.draw",
                          "--format=csv"], capture_output=True, text=True, check=False).stdout)  # fmt: skip
    x, y = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    t = time_calls([lambda: x @ y] * 4)
    print(f"bf16 8192^3: {2 * 8192**3 / t.us / 1e6:.0f} TFLOP/s")
    p, q = (m.to(torch.float8_e4m3fn) for m in (x, y.T.contiguous()))
    one = torch.ones((), device="cuda")
    t = time_calls([lambda: torch._scaled_mm(p, q.T, one, one, out_dtype=torch.bfloat16)] * 4)
    print(f"fp8 8192^3: {2 * 8192**3 / t.us / 1e6:.0f} TFLOP/s")
    z = torch.zeros(16, device="cuda")
    t = time_calls([lambda: nothing[(1,)](z, num_warps=4)] * 200)
    print(f"a kernel that does nothing, in a graph: {t.us:.2f} us")
    for out, size in ((4096, 4096), (2624, 4096), (256, 4096)):
        for n in (1, 16, 64):
            ws = [
                torch.randn(out, size, device="cuda").bfloat16()
                for _ in range(200_000_000 // (2 * out * size))
            ]
            v = torch.randn(n, size, device="cuda").bfloat16()
            t = time_calls([lambda w=w: torch.mm(v, w.T) for w in ws])
            u = time_calls([lambda w=w: torch.mm(v, w.T, out_dtype=torch.float32) for w in ws])
            print(f"cuBLAS bf16 [{n}, {size}] x [{size}, {out}]: {t.us:.2f} us, {2 * out * size / t.us / 1e6:.2f} TB/s;"
                  f" to float32 {u.us:.2f} us")  # fmt: skip


if __name__ == "__main__":
    main()
