"""python -m splitserve.ops.bench [--models deepseek,llama] [--tokens 1,8,16,64,2048,8192] [--out FILE.json]"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .run import Device, commit, measure, measure_device, save, table


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="splitserve bench ops")
    parser.add_argument("--models", default="deepseek,llama")
    parser.add_argument("--tokens", default="1,8,16,64,2048,8192")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--bandwidth", type=float, help="TB/s to bound by, instead of the measured one")
    parser.add_argument("--commit", default="")
    args = parser.parse_args(argv)
    device = measure_device()
    if args.bandwidth:
        device = Device(device.name, args.bandwidth, device.bf16, device.fp8, device.floor_us)
    print(device, flush=True)
    rows = measure(args.models.split(","), [int(t) for t in args.tokens.split(",")], device)
    print(table(rows))
    if args.out:
        save(
            args.out,
            rows,
            device,
            "splitserve bench ops " + " ".join(argv or sys.argv[1:]),
            args.commit or commit(),
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
