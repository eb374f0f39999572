"""What is asked of a server and when: random prompts of exact lengths, and public traces. Pure.

Prompts are token ids, so that a length is exact for every tokenizer. Each run draws new ones (unless a seed is given):
a prompt that was asked before would be answered from a prefix cache. Traces keep the prefixes that they share.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import msgspec

from splitserve.errors import ConfigError

TRACE_BLOCK = 512  # tokens that one hash id of a Mooncake trace stands for


@dataclass(frozen=True)
class Ask:
    """One request: its prompt, how many tokens it wants, and when it comes after the start (open loop)."""

    prompt: tuple[int, ...]
    output_len: int
    at_s: float = 0.0


@dataclass(frozen=True)
class TraceRow:
    """One request of a trace. Equal leading `hash_ids` mean equal leading blocks of TRACE_BLOCK tokens."""

    at_s: float
    input_len: int
    output_len: int
    hash_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Vocabulary:
    """Ids that a prompt may use: [low, high). The lowest ids of most tokenizers are special tokens."""

    low: int = 256
    high: int = 30_000

    @staticmethod
    def of_size(size: int) -> Vocabulary:
        """Leaves out the lowest ids of a large vocabulary and nothing but 0 of a tiny one."""
        if size < 2:
            raise ConfigError(f"a vocabulary of {size} tokens makes no prompts", field="vocab")
        return Vocabulary(min(256, max(1, size // 8)), size)

    def draw(self, rng: random.Random, count: int) -> tuple[int, ...]:
        return tuple(rng.choices(range(self.low, self.high), k=count))


def random_asks(
    num: int,
    *,
    input_len: int,
    output_len: int,
    rng: random.Random,
    vocabulary: Vocabulary,
    rate: float | None = None,
) -> list[Ask]:
    """`num` prompts of exactly `input_len` ids; with `rate`, Poisson arrivals of that many a second."""
    at_s = 0.0
    asks = []
    for _ in range(num):
        if rate is not None:
            at_s += rng.expovariate(rate)
        asks.append(Ask(vocabulary.draw(rng, input_len), output_len, at_s))
    return asks


def trace_asks(
    rows: Sequence[TraceRow],
    *,
    seed: int,
    vocabulary: Vocabulary,
    max_input: int | None = None,
    max_output: int | None = None,
    speed: float = 1.0,
) -> list[Ask]:
    """Prompts for a trace: equal hash ids give equal blocks. `speed` 2 halves the times between arrivals."""
    asks = []
    for number, row in enumerate(rows):
        length = row.input_len if max_input is None else min(row.input_len, max_input)
        prompt: list[int] = []
        for hash_id in row.hash_ids:
            if len(prompt) >= length:
                break
            prompt += vocabulary.draw(random.Random(f"{seed}/block/{hash_id}"), TRACE_BLOCK)
        if len(prompt) < length:
            prompt += vocabulary.draw(random.Random(f"{seed}/row/{number}"), length - len(prompt))
        output_len = row.output_len if max_output is None else min(row.output_len, max_output)
        asks.append(Ask(tuple(prompt[:length]), max(1, output_len), row.at_s / speed))
    return asks


def read_trace(path: Path, limit: int | None = None) -> list[TraceRow]:
    """A Mooncake JSONL or an Azure CSV file, told apart by suffix. ConfigError names the line at fault."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"cannot read the trace {path}: {e}", field="trace") from None
    return read_azure(lines, limit) if path.suffix == ".csv" else read_mooncake(lines, limit)


class _MooncakeRow(msgspec.Struct):
    timestamp: float  # ms
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


def read_mooncake(lines: Iterable[str], limit: int | None = None) -> list[TraceRow]:
    """{"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [...]} a line; times from the first row."""
    rows: list[TraceRow] = []
    decode = msgspec.json.Decoder(_MooncakeRow).decode
    for number, line in enumerate(lines, 1):
        if limit is not None and len(rows) >= limit:
            break
        if not line.strip():
            continue
        try:
            row = decode(line)
        except (msgspec.DecodeError, msgspec.ValidationError) as e:
            raise ConfigError(f"line {number} of the trace: {e}", field="trace") from None
        rows.append(TraceRow(row.timestamp / 1000, row.input_length, row.output_length, row.hash_ids))
    return _from_zero(rows)


def read_azure(lines: Iterable[str], limit: int | None = None) -> list[TraceRow]:
    """TIMESTAMP,ContextTokens,GeneratedTokens with a head line, as in AzurePublicDataset; times from the first row."""
    rows: list[TraceRow] = []
    for number, fields in enumerate(csv.DictReader(lines), 2):
        if limit is not None and len(rows) >= limit:
            break
        try:
            # seven digits of a second are one more than fromisoformat reads
            at_s = datetime.fromisoformat(fields["TIMESTAMP"][:26]).timestamp()
            rows.append(TraceRow(at_s, int(fields["ContextTokens"]), int(fields["GeneratedTokens"])))
        except (KeyError, ValueError, TypeError) as e:
            raise ConfigError(f"line {number} of the trace: {e}", field="trace") from None
    return _from_zero(rows)


def _from_zero(rows: list[TraceRow]) -> list[TraceRow]:
    if not rows:
        raise ConfigError("the trace is empty", field="trace")
    start = min(row.at_s for row in rows)
    return [TraceRow(r.at_s - start, r.input_len, r.output_len, r.hash_ids) for r in rows]
