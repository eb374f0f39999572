"""One HTML page without scripts or anything from elsewhere: tables, and plots drawn as SVG by hand. Pure.

Colours are those of the reader's system, light or dark; each series has its own hue.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 560, 260
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 34, 40
HUES = (205, 25, 130, 280, 60, 340)

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.45 system-ui, sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em; }
table { border-collapse: collapse; margin: 1em 0; }
td, th { padding: .25em .8em; text-align: right; border-bottom: 1px solid #8884; }
td:first-child, th:first-child { text-align: left; }
svg { width: 100%; max-width: 560px; height: auto; margin: .5em 0; }
svg text { font: 12px system-ui, sans-serif; fill: currentColor; }
pre { white-space: pre-wrap; }
"""


@dataclass(frozen=True)
class Bar:
    """A median with the lowest and highest of its repeats."""

    median: float
    low: float
    high: float


def page(title: str, parts: Sequence[str]) -> str:
    """A whole document; `parts` are HTML already."""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def preformatted(text: str) -> str:
    return f"<pre>{escape(text)}</pre>"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; all cells are plain text."""
    lines = ["<table><tr>" + "".join(f"<th>{escape(h)}</th>" for h in head) + "</tr>"]
    lines += ["<tr>" + "".join(f"<td>{escape(c)}</td>" for c in row) + "</tr>" for row in rows]
    return "\n".join([*lines, "</table>"])


def bars(title: str, unit: str, groups: Sequence[tuple[str, Mapping[str, Bar]]]) -> str:
    """Groups of bars from 0, one bar a series, with a whisker from the lowest to the highest repeat."""
    names = list(dict.fromkeys(n for _, group in groups for n in group))
    top = _top([b.high for _, group in groups for b in group.values()])
    parts = [_frame(title, unit, top), *_legend(names)]
    wide = (WIDTH - LEFT - RIGHT) / max(1, len(groups))
    for i, (label, group) in enumerate(groups):
        each = wide * 0.8 / max(1, len(names))
        for j, name in enumerate(names):
            if name not in group:
                continue
            bar, x = group[name], LEFT + wide * (i + 0.1) + each * j
            y, middle = _y(bar.median, top), x + each * 0.45
            parts.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{each * 0.9:.1f}" height="{HEIGHT - BOTTOM - y:.1f}" '
                f'fill="{_colour(j)}"><title>{escape(f"{name} {label}: {bar.median:.4g} {unit}")}</title></rect>'
                f'<line x1="{middle:.1f}" x2="{middle:.1f}" y1="{_y(bar.low, top):.1f}" '
                f'y2="{_y(bar.high, top):.1f}" stroke="currentColor"/>'
            )
        parts.append(_text(LEFT + wide * (i + 0.5), HEIGHT - BOTTOM + 16, label, "middle"))
    return _svg(parts, title)


def lines(
    title: str, unit: str, series: Mapping[str, Sequence[tuple[float, float]]], *, x_unit: str = ""
) -> str:
    """One line a series through its (x, y) points, from (0, 0) on."""
    points = [p for own in series.values() for p in own]
    top, right = _top([y for _, y in points]), max((x for x, _ in points), default=0.0) or 1.0
    parts = [_frame(title, unit, top), *_legend(list(series))]
    for j, own in enumerate(series.values()):
        at = [(LEFT + x / right * (WIDTH - LEFT - RIGHT), _y(y, top)) for x, y in sorted(own)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{_colour(j)}" stroke-width="2"/>')
        parts += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{_colour(j)}"/>' for x, y in at if len(at) < 40
        ]
    parts.append(_text(LEFT, HEIGHT - BOTTOM + 16, "0", "middle"))
    parts.append(_text(WIDTH - RIGHT, HEIGHT - BOTTOM + 16, f"{right:.4g} {x_unit}".strip(), "end"))
    return _svg(parts, title)


def _frame(title: str, unit: str, top: float) -> str:
    """Heading, and horizontal lines at quarters of the scale."""
    rows = [_text(LEFT, 14, f"{title} ({unit})" if unit else title, "start")]
    for k in range(5):
        y = _y(top * k / 4, top)
        rows.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="currentColor" '
            f'opacity="{0.6 if k == 0 else 0.15}"/>'
        )
        rows.append(_text(LEFT - 6, y + 4, f"{top * k / 4:.3g}", "end"))
    return "".join(rows)


def _legend(names: Sequence[str]) -> list[str]:
    found, x = [], float(LEFT)
    for j, name in enumerate(names):
        found.append(f'<rect x="{x:.0f}" y="{HEIGHT - 14}" width="10" height="10" fill="{_colour(j)}"/>')
        found.append(_text(x + 14, HEIGHT - 5, name, "start"))
        x += 30 + 7 * len(name)
    return found


def _svg(parts: Sequence[str], title: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
        + "".join(parts)
        + "</svg>"
    )


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _y(value: float, top: float) -> float:
    return HEIGHT - BOTTOM - value / top * (HEIGHT - TOP - BOTTOM)


def _top(values: Sequence[float]) -> float:
    """The scale's end: the largest value rounded up to two digits; 1 where there is nothing."""
    most = max(values, default=0.0)
    if most <= 0:
        return 1.0
    step = 10.0 ** (len(f"{most:.0f}") - 2) if most >= 1 else most / 10
    return (most // step + 1) * step


def _colour(j: int) -> str:
    return f"hsl({HUES[j % len(HUES)]} 65% 50%)"
