"""A decoder layer in two compiled calls, without Python between its loops: the same bits as its operations one by one.

    attention(i)    x += pending;  pending = out(attend(rotate(qkv(norm(x)))))
    ffn(i)          x += pending;  pending = down(swiglu(gate_up(norm(x))))

A tensor parallel group adds `pending` up after either, and then the bias of out or down, where there is one. What is
left to the operations of this package: layers with experts, and matrices of odd sizes (`serves` says).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from splitserve.ops.ref.coded import GROUP, Coded, Weight

from . import elementwise
from .compiled import compiled
from .dense import matrix
from .llvm import LANES
from .pieces import ATTEND, GATED, NORM, PLACE, PRODUCT, pieces_of
from .shared import LEAST, PIECES, ROWS, attend_parts, borrow, product_step, share, step_of
from .vector import integers_at

# Words of one matrix, in this order; a layer has four, then what is its alone.
FORM, WEIGHT, W_BYTES, OUTPUTS, INPUTS, SCALES, SCALE_BYTES, BIAS, _MATRIX = range(9)
QKV, OUT, GATE_UP, DOWN = (i * _MATRIX for i in range(4))
ATTN_NORM, FFN_NORM, Q_NORM, K_NORM, WINDOW, VIEW, PAGE_STRIDE, HEAD_STRIDE, ROW_STRIDE, _LAYER = range(
    4 * _MATRIX, 4 * _MATRIX + 10
)
# Words of one pass.
(
    TOKENS, X, NEXT, PENDING, NORMED, WIDE, TURNED, MIXED, RESULT, COSINES, SINES, WRITE_PAGE, WRITE_ROW, PAGES,
    PAGES_STRIDE, STARTS, COUNTS, SEQUENCES, PARTS, PAGE_TOKENS, HEADS, KV_HEADS, SIZE, EPS, SCALE, _PASS,
) = range(26)  # fmt: skip


@dataclass(frozen=True)
class LayerWeights:
    """This rank's part of a layer."""

    matrices: tuple[
        Weight, ...
    ]  # qkv [(heads + 2 kv heads) size, hidden], out, gate and up [2 ffn, hidden], down
    norms: tuple[torch.Tensor, torch.Tensor]  # [hidden]: before attention, before ffn
    window: int = 0  # 0: none
    qkv_bias: torch.Tensor | None = None
    gate_up_bias: torch.Tensor | None = None
    head_norms: tuple[torch.Tensor, torch.Tensor] | None = None  # [size]: of queries, of keys


@dataclass(frozen=True)
class Rows:
    """Where the tokens of a pass are, sequence after sequence."""

    pages: torch.Tensor  # [num_seqs, max_pages] int64
    starts: Sequence[int]  # position of each sequence's first token
    counts: Sequence[int]  # tokens of each
    write_page: torch.Tensor  # [num_tokens] int64
    write_row: torch.Tensor  # [num_tokens] int64
    page_tokens: int


def serves(layers: Sequence[LayerWeights]) -> bool:
    """Whether all rows are whole steps of their format."""
    return not any(
        w.shape[1] % (GROUP if isinstance(w, Coded) else LANES) for layer in layers for w in layer.matrices
    )


class Decoder:
    """The layers of a model, as the addresses that compiled code reads."""

    def __init__(
        self, layers: Sequence[LayerWeights], *, heads: int, kv_heads: int, size: int, eps: float
    ) -> None:
        self.layers = tuple(layers)  # whose memory the addresses are of
        self.heads, self.kv_heads, self.size, self.eps = heads, kv_heads, size, eps
        self.words = [_layer_words(layer) for layer in layers]

    def begin(self, x: torch.Tensor, table: tuple[torch.Tensor, torch.Tensor], rows: Rows) -> Pass:
        """A pass of x [num_tokens, hidden], with the cosines and sines of its tokens [num_tokens, size / 2]."""
        return Pass(self, x, table, rows)


class Pass:
    """One step's way through the layers. Its tensors are reused by each of them."""

    def __init__(
        self, decoder: Decoder, x: torch.Tensor, table: tuple[torch.Tensor, torch.Tensor], rows: Rows
    ) -> None:
        self._decoder = decoder
        m, hidden = x.shape
        qkv, *_, down = decoder.layers[0].matrices
        turning = (decoder.heads + decoder.kv_heads) * decoder.size
        self._x, self._next = x.contiguous().clone(), torch.empty_like(x)
        self._result = torch.empty(m, hidden)
        starts, counts = torch.tensor([rows.starts, rows.counts])
        wide = torch.empty(m, max(qkv.shape[0], down.shape[1]))
        normed, turned = torch.empty(m, hidden), torch.empty(m, turning)
        mixed = torch.empty(m, decoder.heads * decoder.size)
        cosines, sines = table
        parts = attend_parts(rows.counts, decoder.kv_heads, decoder.heads // decoder.kv_heads)
        self._kept = (starts, counts, wide, normed, turned, mixed, cosines, sines, rows)
        self._words = np.zeros(_PASS, dtype=np.int64)
        self._address = int(self._words.ctypes.data)
        self._words[:] = (
            m, self._x.data_ptr(), self._next.data_ptr(), 0, normed.data_ptr(), wide.data_ptr(),
            turned.data_ptr(), mixed.data_ptr(), self._result.data_ptr(), cosines.data_ptr(), sines.data_ptr(),
            rows.write_page.data_ptr(), rows.write_row.data_ptr(), rows.pages.data_ptr(), rows.pages.stride(0),
            starts.data_ptr(), counts.data_ptr(), len(rows.counts), parts, rows.page_tokens,
            decoder.heads, decoder.kv_heads, decoder.size, _bits(decoder.eps), _bits(decoder.size**-0.5),
        )  # fmt: skip

    def attention(self, layer: int, view: torch.Tensor, pending: torch.Tensor | None) -> torch.Tensor:
        """[num_tokens, hidden]: this rank's sum, which is `pending` for the next half. `view`: attention.write_rows."""
        words = self._decoder.words[layer]
        words[VIEW : ROW_STRIDE + 1] = (view.data_ptr(), *view.stride()[:3])
        return self._half(attention_half, words, pending)

    def ffn(self, layer: int, pending: torch.Tensor) -> torch.Tensor:
        """[num_tokens, hidden], likewise."""
        return self._half(ffn_half, self._decoder.words[layer], pending)

    def end(self, pending: torch.Tensor) -> torch.Tensor:
        """[num_tokens, hidden]: what comes out of the last layer."""
        return self._x + pending

    def _half(self, half: Half, words: np.ndarray, pending: torch.Tensor | None) -> torch.Tensor:
        self._words[PENDING] = 0 if pending is None else pending.data_ptr()
        crew = borrow()
        try:
            half(crew.address, self._address, int(words.ctypes.data))
        finally:
            crew.busy.release()
        if pending is not None:  # then the sum is in `next`
            self._x, self._next = self._next, self._x
            self._words[X], self._words[NEXT] = self._x.data_ptr(), self._next.data_ptr()
        return self._result


Half = Callable[[int, int, int], None]


def _bits(number: float) -> int:
    """Of a float32."""
    return int(np.float32(number).view(np.int32))


def _layer_words(layer: LayerWeights) -> np.ndarray:
    biases = (layer.qkv_bias, None, layer.gate_up_bias, None)
    words = [w for pair in zip(layer.matrices, biases, strict=True) for w in _matrix_words(*pair)]
    words += [norm.data_ptr() for norm in layer.norms]
    words += [norm.data_ptr() for norm in layer.head_norms] if layer.head_norms else [0, 0]
    words += [layer.window, 0, 0, 0, 0]
    return np.array(words, dtype=np.int64)


def _matrix_words(weight: Weight, bias: torch.Tensor | None) -> tuple[int, ...]:
    form, numbers, row_bytes, scales, scale_bytes = matrix(weight)
    its_bias = 0 if bias is None else bias.data_ptr()
    return form, numbers, row_bytes, *weight.shape, scales, scale_bytes, its_bias


@compiled()
def attention_half(crew, step, layer):
    """See Pass.attention; addresses of a Crew's words, the pass's and the layer's."""
    p, w = integers_at(step), integers_at(layer)
    m, heads, kv_heads, size = p[TOKENS], p[HEADS], p[KV_HEADS], p[SIZE]
    _norm(crew, step, w[ATTN_NORM], w[QKV + INPUTS])
    _linear(crew, p[NORMED], m, layer + 8 * QKV, p[WIDE])
    rows = step_of(m, integers_at(crew)[2], ROWS, PIECES)
    view, page_stride, head_stride, row_stride = w[VIEW], w[PAGE_STRIDE], w[HEAD_STRIDE], w[ROW_STRIDE]
    share(
        crew, PLACE, (m + rows - 1) // rows, rows,
        (p[WIDE], m, heads, kv_heads, size, p[COSINES], p[SINES], p[TURNED], view, page_stride, head_stride,
         row_stride, p[WRITE_PAGE], p[WRITE_ROW], w[Q_NORM], w[K_NORM], p[EPS]),
    )  # fmt: skip
    share(
        crew, ATTEND, p[PARTS], 0,
        (p[TURNED], (heads + kv_heads) * size, size, view, page_stride, head_stride, row_stride, p[PAGES],
         p[PAGES_STRIDE], p[STARTS], p[COUNTS], p[SEQUENCES], kv_heads, heads // kv_heads, size, p[PAGE_TOKENS],
         w[WINDOW], p[SCALE], p[MIXED]),
    )  # fmt: skip
    _linear(crew, p[MIXED], m, layer + 8 * OUT, p[RESULT])


@compiled()
def ffn_half(crew, step, layer):
    """See Pass.ffn."""
    p, w = integers_at(step), integers_at(layer)
    m, inner, k = p[TOKENS], w[DOWN + INPUTS], w[GATE_UP + INPUTS]
    _norm(crew, step, w[FFN_NORM], k)
    pieces = product_step(m, inner, integers_at(crew)[2])
    share(
        crew, GATED, pieces_of(inner, pieces), pieces,
        (w[GATE_UP + FORM], p[NORMED], k, m, w[GATE_UP + WEIGHT], w[GATE_UP + W_BYTES], inner, k, p[WIDE], inner,
         w[GATE_UP + SCALES], w[GATE_UP + SCALE_BYTES], w[GATE_UP + BIAS]),
    )  # fmt: skip
    _linear(crew, p[WIDE], m, layer + 8 * DOWN, p[RESULT])


@compiled()
def _norm(crew, step, weight, hidden):
    """x + pending to `next`, where anything is pending, and its norm."""
    p = integers_at(step)
    m = p[TOKENS]
    rows = step_of(m, integers_at(crew)[2], ROWS, PIECES)
    args = (p[X], p[PENDING], m, hidden, weight, p[EPS], p[NEXT], p[NORMED])
    share(crew, NORM, (m + rows - 1) // rows, rows, args)


@compiled()
def _linear(crew, x, m, matrix, out):
    w = integers_at(matrix)
    n, k = w[OUTPUTS], w[INPUTS]
    pieces = product_step(m, n, integers_at(crew)[2]) if m * n * k >= LEAST else n
    args = (w[FORM], x, k, m, w[WEIGHT], w[W_BYTES], n, k, out, n, w[SCALES], w[SCALE_BYTES])
    share(crew, PRODUCT, pieces_of(n, pieces), pieces, args)
    if w[BIAS] != 0:
        elementwise.add_rows(out, m, n, w[BIAS])
