"""The words that `splitserve` understands. Each command's own code is imported when the command is run."""

from __future__ import annotations

import argparse
import difflib
import importlib
from collections.abc import Callable, Sequence

from splitserve import __version__
from splitserve.errors import ConfigError
from splitserve.words import Parser

_EPILOG = """start here:
  splitserve up deploy/demo.toml     one prefill engine, one decode engine, and the router on 127.0.0.1:8000
  splitserve verify                  prove that the state crosses, and that nothing changes by it
  splitserve down                    stop it

exit codes: 0 done, 1 it ran and failed, 2 wrong input or configuration, 130 Ctrl-C
"""

Run = Callable[[argparse.Namespace], int]


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Namespace with `run`, the function of the chosen command. ConfigError for words that make no command."""
    chosen = argv[0] if argv else ""
    if chosen and not chosen.startswith("-") and chosen not in _COMMANDS:
        near = difflib.get_close_matches(chosen, _COMMANDS, n=1)
        fix = f"did you mean `splitserve {near[0]}`?" if near else f"commands are: {', '.join(_COMMANDS)}"
        raise ConfigError(f"splitserve has no command {chosen!r}", fix=fix)
    parser = Parser(
        prog="splitserve",
        description="Serve a language model with prefill and decode apart, and prove that the state crossed.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"splitserve {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", parser_class=Parser, required=True)
    for name, (text, module, describe) in _COMMANDS.items():
        own = commands.add_parser(
            name, help=text, description=text, allow_abbrev=False, add_help=name not in _OWN_WORDS
        )
        own.set_defaults(run=_later(module, name))
        if name in (chosen, ""):
            describe(own)
    if chosen in ("attend", "on-host") and "--" in argv:
        end = list(argv).index("--")
        args = parser.parse_args(argv[:end])
        args.rest = tuple(argv[end + 1 :])
        return args
    if chosen in _OWN_WORDS:
        args = parser.parse_args([chosen])
        args.words = list(argv[1:])
        return args
    return parser.parse_args(argv)


def _later(module: str, name: str) -> Run:
    """The function `name` of `module`, imported at the call: `--help` needs none of them."""

    def run(args: argparse.Namespace) -> int:
        code: int = getattr(importlib.import_module(module), name.replace("-", "_"))(args)
        return code

    return run


def _json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON for programs")


def _doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file",
        nargs="?",
        default="",
        metavar="FILE",
        help="deployment file: check its models, ports and placement too",
    )
    parser.add_argument("--quick", action="store_true", help="do not start processes that try NIXL")
    parser.add_argument(
        "--setup",
        action="store_true",
        help="print what installs torch, NIXL and Triton for the driver found here",
    )
    parser.add_argument(
        "--run", dest="run_setup", action="store_true", help="with --setup: run it, in this environment"
    )
    parser.add_argument(
        "--fabric",
        nargs="?",
        const="",
        metavar="FILE",
        help="measure the links between prefill and decode ranks, of a deployment file or of one pair on this host",
    )
    _set(parser)
    _json(parser)


def _name(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name", nargs="?", default="", metavar="NAME", help="deployment; default: the one that is up"
    )


def _up(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="deployment file, for example deploy/demo.toml")
    parser.add_argument(
        "--detach", "-d", action="store_true", help="return when ready; it goes on in the background"
    )
    parser.add_argument("--dry-run", action="store_true", help="print what would be started where, and why")
    parser.add_argument(
        "--topology",
        action="append",
        default=[],
        metavar="FILE",
        help="with --dry-run: plan for the machine in FILE (of `splitserve topology --json`), not for this one;"
        " once for each of several hosts",
    )
    _set(parser)
    parser.add_argument(
        "--detached", action="store_true", help=argparse.SUPPRESS
    )  # the other half of --detach
    _json(parser)


def _down(parser: argparse.ArgumentParser) -> None:
    _name(parser)
    parser.add_argument("--kill", action="store_true", help="do not wait for running requests")
    _json(parser)


def _status(parser: argparse.ArgumentParser) -> None:
    _name(parser)
    parser.add_argument(
        "--wait", default="0", metavar="S", help="wait until all of it is ready, at most S seconds"
    )
    _json(parser)


def _logs(parser: argparse.ArgumentParser) -> None:
    _name(parser)
    parser.add_argument(
        "process", nargs="?", default="", metavar="PROCESS", help="for example decode-0; default: all"
    )
    parser.add_argument("--follow", "-f", action="store_true", help="go on until it stops")
    parser.add_argument(
        "--request", default="", metavar="ID", help="only lines that name it (a rid or X-Request-Id)"
    )
    parser.add_argument(
        "--lines",
        "-n",
        default="",
        metavar="N",
        help="last lines of each (default: 50; with --request all that are kept)",
    )
    _json(parser)


def _restart(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("process", metavar="PROCESS", help="for example decode-0")
    _name(parser)
    _json(parser)


def _child(parser: argparse.ArgumentParser) -> None:
    """What a supervisor adds to the command lines of its children."""
    parser.add_argument("--alive-fd", type=int, help=argparse.SUPPRESS)


def _serve(parser: argparse.ArgumentParser) -> None:
    from splitserve.cli import flags
    from splitserve.config import EngineConfig, ServerConfig, TransferConfig

    parser.add_argument("model", metavar="MODEL", help="checkpoint directory, .gguf file, or smollm2-135m")
    flags.add(parser, EngineConfig, "engine", skip=("model",))
    flags.add(parser, TransferConfig, "transfer")
    flags.add(parser, ServerConfig, "server")
    parser.add_argument(
        "--run-dir", default="", metavar="DIR", help="where its sockets go; default: a fresh one"
    )
    parser.add_argument(
        "--control", default="", metavar="SOCKET", help="supervisor to ask when a peer must be fenced"
    )
    _child(parser)


def _attend(parser: argparse.ArgumentParser) -> None:
    from splitserve.numa import POLICIES

    parser.usage = "splitserve attend --url URL [options] -- PROGRAM WORDS..."
    parser.set_defaults(rest=())
    parser.add_argument("--engine", default="engine", metavar="NAME", help="what it is called in messages")
    parser.add_argument("--url", required=True, metavar="URL", help="where it will answer")
    parser.add_argument(
        "--health", default="/health", metavar="PATH", help="answers 200 once it is ready (default: /health)"
    )
    parser.add_argument("--cpus", default="", metavar="LIST", help="cpus to bind it to, as 0-3,8")
    parser.add_argument("--memory-bind", default="none", choices=POLICIES, help="memory policy for --nodes")
    parser.add_argument("--nodes", default="", metavar="LIST", help="memory nodes")
    for flag in ("--run-dir", "--control"):  # every engine is given them; others' have no use for them
        parser.add_argument(flag, default="", help=argparse.SUPPRESS)
    _child(parser)


def _on_host(parser: argparse.ArgumentParser) -> None:
    parser.usage = "splitserve on-host --cluster ADDRESS --crew NAME --process NAME [options] -- WORDS..."
    parser.set_defaults(rest=())
    parser.add_argument("--cluster", required=True, metavar="ADDRESS", help="of the Ray cluster")
    parser.add_argument("--crew", required=True, metavar="NAME", help="the actor on that host")
    parser.add_argument("--process", required=True, metavar="NAME", help="for example decode-0")
    parser.add_argument("--cpus", default="", metavar="LIST", help="where the process itself may run, there")
    for flag, text in (
        ("--env", "NAME=VALUE for it"),
        ("--hold", "a port of its, as PROCESS.KEY=ADDRESS=PORT"),
    ):
        parser.add_argument(flag, action="append", default=[], help=text)
    for flag in ("--run-dir", "--control"):  # every engine is given them; those there have others
        parser.add_argument(flag, default="", help=argparse.SUPPRESS)
    _child(parser)


def _router(parser: argparse.ArgumentParser) -> None:
    from splitserve.cli import flags
    from splitserve.config import RouterConfig

    text = "prefill engine and its rendezvous port; may be repeated"
    parser.add_argument("--prefill", action="append", default=[], metavar="URL[,PORT]", help=text)
    parser.add_argument(
        "--decode", action="append", default=[], metavar="URL", help="decode engine; may be repeated"
    )
    parser.add_argument(
        "--worker", action="append", default=[], metavar="URL", help="unified engine; may be repeated"
    )
    flags.add(parser, RouterConfig, "router")
    _child(parser)


def _words(parser: argparse.ArgumentParser) -> None:
    """Nothing: the part reads its own words, `--help` too."""


def _fetch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", help="OWNER/NAME on the Hub, or a short name: deepseek-v4-flash"
    )
    parser.add_argument("--dir", default="", metavar="DIR", help="where to; default: the model's name, here")
    parser.add_argument(
        "--revision", default="main", metavar="REV", help="branch, tag or commit (default: main)"
    )
    _json(parser)


def _make_checkpoint(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="DIR", help="new directory for it")
    parser.add_argument("--like", default="deepseek-v4-flash", metavar="MODEL", help="deepseek-v4-flash")
    parser.add_argument("--tiny", action="store_true", help="every code path in 6 MB")
    parser.add_argument("--t1", action="store_true", help="the model's own head and window sizes in 52 MB")
    parser.add_argument("--layers", type=int, default=0, metavar="N", help="the first N layers, at full size")
    parser.add_argument("--fp8-experts", action="store_true", help="the -Base variant")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change a whole number of its config.json",
    )
    parser.add_argument(
        "--config-only",
        action="store_true",
        help="no weights: for engines that make theirs up (dummy_weights)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="same seed, same bytes (default: 0)")
    _json(parser)


def _state(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="checkpoint directory (its config.json is enough)")
    lengths = [256, 4096, 4097, 131072]
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=lengths, metavar="N", help="prompt lengths in tokens"
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="default: cuda where there is a GPU, else cpu"
    )
    parser.add_argument(
        "--dtype", default="auto", choices=("auto", "f32", "bf16", "f16"), help="default: the engine's there"
    )
    parser.add_argument("--kv-dtype", default="auto", choices=("auto", "fp8"), help="fp8: packed rows")
    parser.add_argument("--page-tokens", type=int, default=0, metavar="N", help="default: the engine's")
    _json(parser)


def _render(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        choices=("kubernetes", "systemd"),
        help="kubernetes: manifests for `kubectl apply -f -`; systemd: a unit that runs `up`",
    )
    parser.add_argument("file", metavar="FILE", help="deployment file, for example deploy/demo.toml")
    parser.add_argument(
        "--image", default="splitserve:latest", help="container image (default: splitserve:latest)"
    )
    parser.add_argument("--namespace", default="default", metavar="NAME", help="default: default")
    parser.add_argument(
        "--cpus", type=int, default=0, metavar="N", help="of each rank; default: its threads, or 4"
    )
    parser.add_argument(
        "--memory", default="", metavar="SIZE", help="of each engine, as 200Gi; default: no request"
    )
    parser.add_argument("--shm", default="8Gi", metavar="SIZE", help="of an engine's /dev/shm (default: 8Gi)")
    parser.add_argument(
        "--models", default="", metavar="CLAIM", help="volume claim that holds the model's directory"
    )
    parser.add_argument(
        "--user", default="", metavar="NAME", help="whom the systemd service runs as (default: root)"
    )
    _set(parser)


def _set(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="change a setting; may be repeated",
    )


def _kernels(parser: argparse.ArgumentParser) -> None:
    from splitserve.ops.kernels.archs import ARCHS

    archs = ",".join(map(str, ARCHS))
    parser.add_argument("action", choices=("build",), help="build: compile them ahead of time, without a GPU")
    parser.add_argument("--arch", default=archs, metavar="LIST", help=f"default: {archs}")
    parser.add_argument(
        "--cache", default="", metavar="DIR", help="default: where Triton looks on this machine"
    )
    parser.add_argument("--jobs", type=int, default=0, metavar="N", help="processes (default: all cores)")
    parser.add_argument("--quick", action="store_true", help="one form of each kernel in each case")
    parser.add_argument("--report", default="", metavar="FILE", help="write what was found as JSON")


_OWN_WORDS = ("verify", "bench", "compare")

_DEPLOY, _SERVE, _MACHINE = "splitserve.cli.deploy", "splitserve.cli.serve", "splitserve.cli.machine"
_MODEL, _KERNELS = "splitserve.cli.model", "splitserve.cli.kernels"
_COMMANDS: dict[str, tuple[str, str, Callable[[argparse.ArgumentParser], None]]] = {
    "up": ("start a deployment", _DEPLOY, _up),
    "down": ("stop a deployment", _DEPLOY, _down),
    "status": ("what is up, where, and how it does", _DEPLOY, _status),
    "logs": ("what the processes wrote", _DEPLOY, _logs),
    "restart": ("restart one process of a deployment", _DEPLOY, _restart),
    "serve": ("one engine behind HTTP", _SERVE, _serve),
    "router": ("one address in front of engines", _SERVE, _router),
    "attend": ("another engine's server (SGLang, vLLM), for a supervisor", _SERVE, _attend),
    "on-host": ("a process on another host (Ray), for a supervisor", _SERVE, _on_host),
    "verify": ("prove that split and unified answer alike", _SERVE, _words),
    "bench": ("measure a server; `bench ops`: the kernels on this GPU", _SERVE, _words),
    "compare": ("does the split pay on these devices?", _SERVE, _words),
    "fetch": ("download a model", _MODEL, _fetch),
    "make-checkpoint": ("write a random model", _MODEL, _make_checkpoint),
    "state": ("bytes that a model keeps for a request", _MODEL, _state),
    "kernels": ("compile the GPU kernels ahead of time", _KERNELS, _kernels),
    "render": ("a deployment in another system's words", "splitserve.cli.render", _render),
    "topology": ("cpus, memory and GPUs of this machine", _MACHINE, _json),
    "doctor": ("check that everything needed is here", "splitserve.cli.doctor", _doctor),
    "version": ("print the version", _MACHINE, _json),
}
