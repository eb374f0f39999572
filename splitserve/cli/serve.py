"""`serve`, `router`, `verify` and `bench`: flags to configs, then the part itself."""

from __future__ import annotations

import argparse

from splitserve.cli import flags
from splitserve.config import EngineConfig, RouterConfig, ServerConfig, TransferConfig
from splitserve.errors import ConfigError


def serve(args: argparse.Namespace) -> int:
    """One engine: the HTTP server in this process, its ranks as children."""
    engine = flags.read(args, EngineConfig, "engine")
    transfer = flags.read(args, TransferConfig, "transfer")
    config = flags.read(args, ServerConfig, "server")
    from splitserve.server.main import run

    return int(
        run(engine, transfer, config, alive_fd=args.alive_fd, run_dir=args.run_dir, control=args.control)
    )


def router(args: argparse.Namespace) -> int:
    """The router in front of engines that run already."""
    config = flags.read(args, RouterConfig, "router")
    prefills = [_prefill(text) for text in args.prefill]
    if not args.worker and not (prefills and args.decode):
        raise ConfigError(
            f"{len(prefills)} prefill, {len(args.decode)} decode and {len(args.worker)} unified engines serve nobody",
            fix="give --prefill URL,PORT and --decode URL, or --worker URL",
        )
    from splitserve.router.main import run

    return int(run(config, prefill=prefills, decode=args.decode, workers=args.worker, alive_fd=args.alive_fd))


def verify(args: argparse.Namespace) -> int:
    """The proof reads its own words."""
    from splitserve.proof.main import run

    return int(run(args.words))


def bench(args: argparse.Namespace) -> int:
    """The benchmark reads its own words."""
    from splitserve.bench.main import run

    return int(run(args.words))


def _prefill(text: str) -> tuple[str, int | None]:
    """'http://host:1234,5678' is that URL with rendezvous port 5678."""
    url, comma, port = text.partition(",")
    if comma and not port.isdigit():
        raise ConfigError(
            f"--prefill {text}: {port!r} is no port", field="prefill", fix="write --prefill URL,PORT"
        )
    return url, int(port) if comma else None
