"""Settings to command-line flags: the words that start one child, as a person could type them.

The inverse (flags to settings) is in cli/flags.py; a test sends every setting there and back. Port numbers that are
not chosen yet stand as `{process.port}` and are filled in by `fill`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any

from splitserve.errors import InvariantError

Ports = Mapping[str, int]
"""Chosen port numbers by "process.port" name, for example {"prefill-0.http": 31001}."""


def to_flags(config: Any, *, skip: Collection[str] = ()) -> list[str]:
    """Flags for every field of a config that differs from its default."""
    words: list[str] = []
    for f in fields(config):
        value = getattr(config, f.name)
        if f.name in skip or value == f.default:
            continue
        flag = f"--{f.name.replace('_', '-')}"
        match value:
            case bool():
                words.append(flag if value else f"--no-{flag[2:]}")
            case tuple() if all(isinstance(v, int) for v in value):
                words += [flag, ",".join(map(str, value))]
            case tuple():
                words += [word for item in value for word in (flag, str(item))]
            case _:
                words += [flag, str(value)]
    return words


def port_mark(process: str, port: str) -> str:
    """What stands for a port in a command line until it is chosen."""
    return f"{{{process}.{port}}}"


def fill(words: tuple[str, ...], ports: Ports) -> tuple[str, ...]:
    """Put chosen ports in the place of their marks. InvariantError for a mark without a port."""
    marks = {f"{{{name}}}": str(port) for name, port in ports.items()}
    filled = []
    for word in words:
        for mark, port in marks.items():
            word = word.replace(mark, port)  # noqa: PLW2901
        if "{" in word and word.endswith("}"):
            raise InvariantError(f"no port chosen for {word}")
        filled.append(word)
    return tuple(filled)


def reach(host: str) -> str:
    """The address at which this host reaches a server bound to `host`."""
    return {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)


def url(host: str, port: int | str) -> str:
    """What a client on this host writes to reach a server bound to `host`."""
    name = reach(host)
    return f"http://{f'[{name}]' if ':' in name else name}:{port}"
