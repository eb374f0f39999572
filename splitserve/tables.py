"""Tables as plain lines: every cell whole, whatever the width and without a terminal. No rules and no colours."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def columns(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: Collection[int] = ()
) -> list[str]:
    """`head` and `rows` below each other; columns whose index is in `numbers` stand right, the others left."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = []
    for row in [head, *rows]:
        cells = zip(row, widths, strict=True)
        drawn = [c.rjust(w) if i in numbers else c.ljust(w) for i, (c, w) in enumerate(cells)]
        lines.append("  ".join(drawn).rstrip())
    return lines
