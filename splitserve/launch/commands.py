"""Settings to command-line flags: the words that start one child, as a person could type them.

The inverse (flags to settings) is in cli/flags.py; a test sends every setting there and back. Port numbers that are
not chosen yet stand as `{process.port}` and are filled in by `fill`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from typing import Any

from splitserve.errors import InvariantError

Ports = Mapping[str, int]
"""Chosen port numbers by "process.port" name, for example {"prefill-0.http": 31001}."""

_MARK = re.compile(r"\{([\w.-]+\.\w+)\}")


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
    return tuple(fill_word(word, ports) for word in words)


def fill_word(word: str, ports: Ports) -> str:
    """`fill` for one word: a command's, or an environment variable's value. Other braces, as JSON has, stay."""

    def port(mark: re.Match[str]) -> str:
        if mark[1] not in ports:
            raise InvariantError(f"no port chosen for {mark[0]}")
        return str(ports[mark[1]])

    return _MARK.sub(port, word)


def with_flags(words: Sequence[str], flags: Sequence[str]) -> tuple[str, ...]:
    """Add flags to one of our commands: before a `--`, behind which another program's words begin."""
    end = list(words).index("--") if "--" in words else len(words)
    return (*words[:end], *flags, *words[end:])


def reach(host: str) -> str:
    """The address at which this host reaches a server bound to `host`."""
    return {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)


def url(host: str, port: int | str) -> str:
    """What a client on this host writes to reach a server bound to `host`."""
    name = reach(host)
    return f"http://{f'[{name}]' if ':' in name else name}:{port}"
