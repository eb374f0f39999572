"""The argument parser of every command: what it cannot read is a ConfigError with a fix, not a usage text and an exit.

And a command line as results keep it.

Not the commands themselves: cli, bench, compare and proof describe their own words.
"""

from __future__ import annotations

import argparse
import difflib
import shlex
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NoReturn

from splitserve.errors import ConfigError

SECRET = ("--api-key",)
"""Flags whose value nobody may read who reads what was measured."""


def command_line(argv: Sequence[str], *, own: Collection[str] = ()) -> str:
    """A command line to be kept with what came of it, as a person would give it again.

    It has KEY for each secret, the program's name without its place on this machine, and not the flags `own`, which
    one of our processes gives another.
    """
    program = "splitserve" if Path(argv[0]).name == "__main__.py" else Path(argv[0]).name
    hidden = dict.fromkeys(SECRET, "KEY")
    return shlex.join([program, *replaced(argv[1:], hidden | dict.fromkeys(own))])


def replaced(words: Sequence[str], values: dict[str, str | None]) -> list[str]:
    """`words` with these flags' values, given as --flag VALUE or --flag=VALUE, replaced; None drops flag and value."""
    found: list[str] = []
    rest = iter(words)
    for word in rest:
        flag, equals, _ = word.partition("=")
        if flag not in values:
            found.append(word)
            continue
        if not equals:
            next(rest, None)
        if (value := values[flag]) is not None:
            found += [f"{flag}={value}"] if equals else [flag, value]
    return found


class Parser(argparse.ArgumentParser):
    """argparse with our errors. `parse_args` raises ConfigError; --help and --version still end the process."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog}: {message}", fix=f"see `{self.prog} --help`")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's, but flags left over are this parser's to refuse: a subcommand knows its own best."""
        found, rest = super().parse_known_args(args, namespace)
        if rest:
            self._refuse(rest)
        return found, rest

    def _refuse(self, rest: list[str]) -> NoReturn:
        flag = next((word.partition("=")[0] for word in rest if word.startswith("-")), "")
        known = [w for w, a in self._option_string_actions.items() if a.help != argparse.SUPPRESS]
        near = difflib.get_close_matches(flag, known, n=1) if flag else []
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(
            f"{self.prog}: unrecognized arguments: {' '.join(rest)}", fix=f"{hint}see `{self.prog} --help`"
        )
