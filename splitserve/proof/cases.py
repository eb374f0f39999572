"""What `verify` asks: real text cut to lengths at which handoffs go wrong, greedy and seeded.

Lengths sit around page and chunk borders, since those are where a last row, a partly filled page or a second chunk
would be lost; a long prompt crosses in many chunks while later ones are still computed.
"""

from __future__ import annotations

from dataclasses import dataclass

TEXT = """The lighthouse keeper counted ships the way other people count sheep. On clear nights there were nineteen of
them, on foggy ones none, and he wrote both numbers into the same ledger with the same care. In March 1897 a storm took
the lower steps, and for 12 days he lived on bread, salted fish and 3 books: a grammar, an atlas, and a treatise on the
motion of fluids whose author had never seen the sea. When the boat came at last, it brought a letter, a new lamp and a
clerk who wished to know why the ledger had gaps. "There are no gaps," said the keeper. "Where nothing is written,
nothing was seen, and I looked all night." The clerk, who was paid by the line, did not like this answer. He asked for
tables: wind by the hour, height of water at 06:00 and 18:00, oil burnt in litres (0.75 a watch), names of vessels with
port and cargo. So the keeper learned to draw tables. He found that a number alone means little, that two numbers make
a question, and that the answer is usually the thing one forgot to measure. By the third winter he could tell from the
oil alone what the wind had been, and from the wind which captains would be late. He kept that knowledge to himself,
until the night when the coast telegraph failed and somebody had to decide, without asking, which of two lamps to light.
"""


@dataclass(frozen=True)
class Question:
    name: str
    tokens: tuple[int, ...]
    num_new: int
    temperature: float = 0.0
    seed: int = 0


def questions(
    text_ids: list[int], *, page_tokens: int, step_tokens: int, quick: bool = False
) -> list[Question]:
    """The questions for an engine with these borders. `text_ids` are the tokens of TEXT, repeated as needed.

    Each starts at another place of the text, so that no question's beginning is another's.
    """
    lengths = {
        "one token": 1,
        "page - 1": page_tokens - 1,
        "one page": page_tokens,
        "page + 1": page_tokens + 1,
        "one chunk": step_tokens,
        "chunk + 1": step_tokens + 1,
        "4 chunks": 4 * step_tokens + page_tokens // 2 + 3,
    }
    if quick:
        lengths = {name: lengths[name] for name in ("page + 1", "chunk + 1")}
    out = []
    for i, (name, length) in enumerate(lengths.items()):
        out.append(Question(name, _cut(text_ids, 7 * i, length), 12))
    for i, name in enumerate(("page + 1",) if quick else ("one page", "chunk + 1")):
        tokens = _cut(text_ids, 101 + 7 * i, lengths[name])
        out.append(Question(f"{name}, seeded", tokens, 12, temperature=0.8, seed=20260 + i))
    return out


def _cut(ids: list[int], start: int, length: int) -> tuple[int, ...]:
    repeated = ids * (-(-(start + length) // len(ids)))
    return tuple(repeated[start : start + length])
