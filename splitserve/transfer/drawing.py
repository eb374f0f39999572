"""Draws the tables of handoff.py as text, for docs/handoff.md. `python -m splitserve.transfer.drawing FILE` renews one.

A test compares the page with what this module draws, so that the page cannot describe another protocol than the code.
"""

from __future__ import annotations

import sys
from pathlib import Path

from splitserve.errors import ConfigError
from splitserve.transfer.handoff import RECEIVER, RX_FINAL, SENDER, TX_FINAL, Rx, S, Table, Tx

BEGIN = "<!-- drawn by splitserve.transfer.drawing: begin -->"
END = "<!-- drawn by splitserve.transfer.drawing: end -->"


def diagram(table: Table[S], start: S, final: frozenset[S]) -> str:
    """A Mermaid state diagram: one arrow for each pair of states, with the events that lead there."""
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {start}"]
    for state, row in table.items():
        arrows: dict[S, list[str]] = {}
        for event, (then, _) in row.items():
            if then is not state:
                arrows.setdefault(then, []).append(event)
        lines += [f"    {state} --> {then}: {', '.join(events)}" for then, events in arrows.items()]
    lines += [f"    {state} --> [*]" for state in table if state in final]
    return "\n".join([*lines, "```"])


def listing(table: Table[S]) -> str:
    """Every entry: state, event, next state, actions in order."""
    lines = ["| state | event | then | actions |", "|---|---|---|---|"]
    for state, row in table.items():
        for event, (then, actions) in row.items():
            stays = "(stays)" if then is state else str(then)
            lines.append(f"| {state} | {event} | {stays} | {', '.join(actions)} |")
    return "\n".join(lines)


def drawing() -> str:
    """Both sides, as they stand in the code."""
    parts = [
        "### Prefill: `SENDER`",
        diagram(SENDER, Tx.NEW, TX_FINAL),
        listing(SENDER),
        "### Decode: `RECEIVER`",
        diagram(RECEIVER, Rx.OPEN, RX_FINAL),
        listing(RECEIVER),
    ]
    return "\n\n".join([BEGIN, *parts, END])


def renewed(page: str) -> str:
    """`page` with the drawing between its markers replaced. Raises ConfigError where it has none."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ConfigError(f"the page has no {BEGIN} ... {END}")
    return before + drawing() + after


def main(argv: list[str]) -> None:
    for name in argv:
        path = Path(name)
        path.write_text(renewed(path.read_text()))


if __name__ == "__main__":
    main(sys.argv[1:])
