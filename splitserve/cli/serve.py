"""`serve`, `router`, `attend`, `on-host`, `verify`, `bench` and `compare`: flags to configs, then the part itself."""

from __future__ import annotations

import argparse

from splitserve.cli import flags
from splitserve.config import EngineConfig, RouterConfig, ServerConfig, TransferConfig
from splitserve.errors import ConfigError
from splitserve.numa import parse_list
from splitserve.types import Role


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
    from splitserve.router.fleet import Endpoint
    from splitserve.router.main import run

    workers = [Endpoint.parse(text, Role.PREFILL) for text in args.prefill]
    workers += [Endpoint.parse(text, Role.DECODE) for text in args.decode]
    workers += [Endpoint.parse(text, Role.UNIFIED) for text in args.worker]
    return int(run(config, workers=workers, alive_fd=args.alive_fd))


def attend(args: argparse.Namespace) -> int:
    """Another engine's server, which is bound, watched and ended as ours are."""
    from splitserve.launch.attend import Attended, run

    if not args.rest:
        raise ConfigError("splitserve attend has nothing to run", fix="put its command behind `--`")
    try:
        cpus, nodes = (tuple(parse_list(text)) for text in (args.cpus, args.nodes))
    except ValueError as e:
        raise ConfigError(
            f"splitserve attend: no list of numbers: {e}", fix="for example --cpus 0-3,8"
        ) from None
    words = Attended(
        args.engine,
        args.rest,
        args.url.rstrip("/"),
        args.health,
        cpus=cpus,
        memory=args.memory_bind,
        nodes=nodes,
        alive_fd=args.alive_fd,
    )
    return run(words)


def on_host(args: argparse.Namespace) -> int:
    """A process on another host of the cluster, as a child of the supervisor here."""
    from splitserve.launch.hosts import relay

    remote = relay.Remote(
        args.cluster,
        args.crew,
        args.process,
        tuple(args.rest),
        dict(text.split("=", 1) for text in args.env),
        tuple(parse_list(args.cpus)),
        relay.parse_holds(args.hold),
    )
    return relay.run(remote, alive_fd=args.alive_fd)


def verify(args: argparse.Namespace) -> int:
    """The proof reads its own words."""
    from splitserve.proof.main import run

    return int(run(args.words))


def bench(args: argparse.Namespace) -> int:
    """The benchmark reads its own words; `bench ops` is another one, of kernels."""
    if args.words[:1] == ["ops"]:
        from splitserve.cli.kernels import bench_ops

        return bench_ops(args.words[1:])
    from splitserve.bench.main import run
    from splitserve.launch.rundir import root
    from splitserve.launch.stage import running_key, running_url

    return int(
        run(
            args.words,
            running_url=running_url(otherwise=""),
            key_of=running_key,
            program=args.program,
            runs_dir=root() / ".bench",
        )
    )


def compare(args: argparse.Namespace) -> int:
    """The comparison reads its own words."""
    from splitserve.compare.main import run

    return int(run(args.words))
