"""python -m splitserve.ops.kernels --arch 80,89,90,100,120 --cache DIR [--jobs N] [--quick REPORT.json]

`--quick` compiles matrix kernels in all their forms and one form of each other kernel, and writes what it found.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .build import ARCHS, build, missing
from .main import build_command, parse_archs, report, write_built


def main() -> int:
    parser = argparse.ArgumentParser(prog="splitserve kernels build")
    parser.add_argument("--arch", default=",".join(map(str, ARCHS)))
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--jobs", type=int)
    parser.add_argument("--quick", type=Path)
    args = parser.parse_args()
    archs = parse_archs(args.arch)
    if args.quick:
        built = build(archs, cache=args.cache, jobs=args.jobs, whole=False)
        write_built(args.quick, built)
        print(report(built))
        return 1 if missing(built, archs) or any(b.problem for b in built) else 0
    text, code = build_command(archs, cache=args.cache, jobs=args.jobs)
    print(text)
    return code


if __name__ == "__main__":
    sys.exit(main())
