"""docs/settings.md is what config.py says. `python tests/unit/test_settings_page.py` writes the page anew."""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path
from typing import Any

from splitserve.config import SECTIONS, GroupConfig, ProgramConfig

PAGE = Path(__file__).parents[2] / "docs" / "settings.md"
ROLES = ("prefill", "decode", "unified")

HEAD = """# Settings

Every setting of a deployment file, as `splitserve/config.py` has them; [deploy.md](deploy.md) says where values come from
and which source is the stronger. `[engine] max_seqs` is SPLITSERVE_ENGINE_MAX_SEQS in the environment and
`--set engine.max_seqs=32` as a flag. This page is written by `python tests/unit/test_settings_page.py`; a test compares.
"""


def page() -> str:
    """The whole page: a table for each section; roles have what [engine] has, and `replicas`."""
    parts = [HEAD]
    for section, cls in SECTIONS.items():
        if section in ROLES[1:]:
            continue
        if section == ROLES[0]:
            title = ", ".join(f"[{r}]" for r in ROLES)
            shared = {f.name for f in dataclasses.fields(ProgramConfig)}
            own = [f for f in dataclasses.fields(GroupConfig) if f.name not in shared]
            parts.append(
                f"## {title}\n\nAs `[engine]`, for the engines of one role, and:\n\n{table(GroupConfig, own)}"
            )
        else:
            parts.append(f"## [{section}]\n\n{table(cls, dataclasses.fields(cls))}")
    return "\n".join(parts)


def table(cls: type, fields: typing.Iterable[dataclasses.Field[Any]]) -> str:
    hints = typing.get_type_hints(cls)
    rows = ["| setting | kind | default | what it is |", "|---|---|---|---|"]
    rows += [f"| `{f.name}` | {kind(f, hints[f.name])} | {default(f.default)} | {cell(f)} |" for f in fields]
    return "\n".join(rows) + "\n"


def kind(f: dataclasses.Field[Any], hint: Any) -> str:
    low, high = f.metadata["low"], f.metadata["high"]
    name = {bool: "true or false", int: "whole number", float: "number", str: "text"}.get(hint, "list")
    least = [] if low is None else [f"at least {low}"]
    most = [] if high is None else [f"at most {high}"]
    return ", ".join([name, *least, *most])


def default(value: Any) -> str:
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        return f"`[{', '.join(map(str, value))}]`"
    return f"`{value}`" if value != "" else "empty"


def cell(f: dataclasses.Field[Any]) -> str:
    choices = f"; one of {', '.join(f.metadata['one_of'])}" if f.metadata["one_of"] else ""
    return f"{f.metadata['doc']}{choices}".replace("|", "\\|")


def test_the_page_is_what_config_says() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "python tests/unit/test_settings_page.py writes it"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
