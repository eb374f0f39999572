"""Compiles what a measurement will need, in as many processes as there are cores.

TRITON_CACHE_DIR=DIR python benchmarks/ops/precompile.py ARCH
"""

from __future__ import annotations

import sys
import time

from splitserve.ops.kernels.build import build, missing


def main() -> None:
    arch, start = int(sys.argv[1]), time.time()
    built = build([arch])
    print(f"{len(built)} forms of kernels for sm_{arch} in {time.time() - start:.0f} s")
    for b in built:
        if b.problem:
            print(b.kernel, b.problem, b.constants)
    print("missing:", missing(built, [arch]))


if __name__ == "__main__":
    main()
