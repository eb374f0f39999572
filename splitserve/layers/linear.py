"""Linear maps of a tensor parallel group: cut by output (column) or by input (row), and a vocabulary cut by tokens."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch

from splitserve.ops import ref
from splitserve.ops.ref import Weight

from .forward import Group


@dataclass(frozen=True)
class ColumnLinear:
    """This rank's outputs from whole inputs; nothing is exchanged. With a group of one: an ordinary linear map."""

    weight: Weight  # [out / tp, in]
    bias: torch.Tensor | None = None  # [out / tp]
    ops: ModuleType = ref

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.ops.linear(x, self.weight, self.bias)


@dataclass(frozen=True)
class RowLinear:
    """Whole outputs from this rank's inputs: partial sums are added over the group, then the bias once."""

    weight: Weight  # [out, in / tp]
    bias: torch.Tensor | None  # [out], whole on every rank
    tp: Group
    ops: ModuleType = ref

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.added(self.ops.linear(x, self.weight))

    def added(self, y: torch.Tensor) -> torch.Tensor:
        """What a rank's own product [num_tokens, out] becomes."""
        y = self.tp.all_reduce(y)
        return y if self.bias is None else y + self.bias


@dataclass(frozen=True)
class Embedding:
    """A token table cut by tokens into equal shares; the last share is padded with zero rows."""

    table: Weight  # [vocab_padded / tp, hidden]
    tp: Group

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """[num_tokens] -> [num_tokens, hidden]."""
        return self.tp.all_reduce(ref.embed(tokens, self.table, self.tp.rank * self.table.shape[0]))


@dataclass(frozen=True)
class Head:
    """Scores of all tokens, each rank its share of the vocabulary. The table may be the embedding's."""

    table: Weight  # [vocab_padded / tp, hidden]
    vocab: int
    tp: Group
    ops: ModuleType = ref

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[num_logits, hidden] -> [num_logits, vocab] float32, whole on every rank."""
        logits = self.tp.all_gather(self.ops.linear(x, self.table), dim=-1)
        return logits[:, : self.vocab].float()
