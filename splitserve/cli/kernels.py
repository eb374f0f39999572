"""`kernels build` and `bench ops`: what needs Triton, or a GPU, is looked for before it is imported."""

from __future__ import annotations

import argparse
import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path

from splitserve.errors import ConfigError
from splitserve.ops.kernels.archs import parse_archs


def kernels(args: argparse.Namespace) -> int:
    """Compile every kernel ahead of time; no GPU is needed. Exit code 1 where one has a problem."""
    archs = parse_archs(args.arch)
    if args.jobs < 0:
        raise ConfigError(f"--jobs {args.jobs}: needs at least 1", field="jobs", fix="0 takes all cores")
    cache = Path(args.cache) if args.cache else None
    if cache is not None:
        _writable(cache)
    _need("torch", "triton")
    os.environ.pop("TRITON_INTERPRET", None)  # kernels under the interpreter cannot be compiled
    from splitserve.ops.kernels.main import build_command

    into = Path(args.report) if args.report else None
    text, code = build_command(archs, cache=cache, jobs=args.jobs or None, quick=args.quick, into=into)
    print(text)
    return code


def bench_ops(words: Sequence[str]) -> int:
    """Time every kernel on the GPU at hand against what that GPU can do."""
    from splitserve.ops.bench.words import from_words

    plan = from_words(words)
    _need("torch", "triton")
    from splitserve.ops.bench.main import run

    return run(plan)


def _need(*packages: str) -> None:
    for name in packages:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"the package {name} is not installed here", fix=f"pip install {name}")


def _writable(cache: Path) -> None:
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise ConfigError(
            f"--cache {cache}: {e.strerror}", field="cache", fix="name a directory of yours"
        ) from e
    if not os.access(cache, os.W_OK | os.X_OK):
        raise ConfigError(f"--cache {cache}: not writable", field="cache", fix="name a directory of yours")
