"""The argument parser of every command: what it cannot read is a ConfigError with a fix, not a usage text and an exit.

Not the commands themselves: cli, bench, compare and proof describe their own words.
"""

from __future__ import annotations

import argparse
import difflib
from typing import Any, NoReturn

from splitserve.errors import ConfigError


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
