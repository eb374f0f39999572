"""Command-line flags from the fields of config.py, and back from parsed flags to a config.

A field `step_tokens: int` is the flag `--step-tokens N`; a bool has `--x` and `--no-x`; a tuple of numbers is one word
"0-3,8"; a tuple of strings is a flag to repeat. launch/commands.py writes the same flags.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import typing
from collections.abc import Collection
from typing import TypeVar

from splitserve.config import check_environment, resolve

T = TypeVar("T")


def add(parser: argparse.ArgumentParser, cls: type, title: str, *, skip: Collection[str] = ()) -> None:
    """Add a flag for every field of `cls`. Nothing is converted here: config.resolve does it, with better words."""
    group = parser.add_argument_group(title)
    hints = typing.get_type_hints(cls)
    for f in dataclasses.fields(cls):
        if f.name in skip:
            continue
        flag, default = f"--{f.name.replace('_', '-')}", _shown(f.default)
        text = f"{f.metadata['doc']}{default}".replace("%", "%%")
        if hints[f.name] is bool:
            action = argparse.BooleanOptionalAction
            group.add_argument(flag, action=action, default=argparse.SUPPRESS, help=text)
        elif hints[f.name] == tuple[str, ...]:
            group.add_argument(flag, action="append", default=argparse.SUPPRESS, metavar="TEXT", help=text)
        else:
            choices = f.metadata["one_of"]
            metavar = "|".join(choices) if choices else f.name.rpartition("_")[2].upper()
            group.add_argument(flag, default=argparse.SUPPRESS, metavar=metavar, help=text)


def read(args: argparse.Namespace, cls: type[T], section: str) -> T:
    """The config of `cls` from environment and flags. ConfigError names the flag at fault."""
    given = {f.name for f in dataclasses.fields(cls)} & set(vars(args))  # type: ignore[arg-type]
    layers = [(f"flag --{name.replace('_', '-')}", {name: getattr(args, name)}) for name in sorted(given)]
    check_environment(os.environ, (section,))
    config, _ = resolve(cls, section, *layers)
    return config


def _shown(default: object) -> str:
    return "" if default in ("", (), 0, False, None) else f" (default: {default})"
