"""The decoder of Llama, SmolLM2, Mistral, Qwen2 and Qwen3, dense or with experts: one forward pass, parts by config.

    x = embed(tokens)
    for each layer:   x = x + out(attend(rotate(qkv(norm(x)))))        pre-norm attention (Llama 2, arXiv 2307.09288)
                      x = x + down(swiglu(gate_up(norm(x))))           or a mixture of such experts (Qwen3)
    logits = head(norm(x[logit_rows]))

A rank holds its heads (and the KV heads they read), its share of the FFN and its share of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from splitserve.layers.attention import AttentionPlan, attend, plan_attention
from splitserve.layers.forward import Cut, Forward, Group
from splitserve.layers.linear import ColumnLinear, Embedding, Head, RowLinear
from splitserve.ops.choose import kernels
from splitserve.ops.ref.coded import Coded, Weight
from splitserve.spec import local_pieces
from splitserve.weights.load import DTYPES, SCALES, load
from splitserve.weights.locate import Source
from splitserve.weights.open import open_checkpoint
from splitserve.weights.rules import DECODER, Sizes, expand

from .config import ModelConfig
from .rope import frequencies
from .shares import check_decoder

_COMPILING = 0.3  # of a start, where nothing was compiled before

Table = tuple[torch.Tensor, torch.Tensor]
Made = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # [T, heads, head_dim] each


@dataclass(frozen=True)
class Attention:
    qkv: ColumnLinear  # rows: this rank's q heads, k heads, v heads
    out: RowLinear
    q_norm: torch.Tensor | None  # [head_dim], Qwen3
    k_norm: torch.Tensor | None
    head_dim: int
    kv_heads: int  # of this rank
    eps: float
    layer: int
    ops: ModuleType

    def __call__(self, x: torch.Tensor, fwd: Forward, table: Table, plan: AttentionPlan) -> torch.Tensor:
        return self.out(self.over(self.made(x, table), fwd, plan))

    def made(self, x: torch.Tensor, table: Table) -> Made:
        """Of [T, hidden]: queries, keys and values, normed and turned."""
        ops = self.ops
        heads = self.qkv(x).unflatten(-1, (-1, self.head_dim))
        turned, v = heads[:, : -self.kv_heads], heads[:, -self.kv_heads :]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = turned[:, : -self.kv_heads], turned[:, -self.kv_heads :]
            q, k = ops.rms_norm(q, self.q_norm, self.eps), ops.rms_norm(k, self.k_norm, self.eps)
            turned = torch.cat((q, k), dim=1)
        turned = ops.rotate(turned, table)
        return turned[:, : -self.kv_heads], turned[:, -self.kv_heads :], v

    def over(self, made: Made, fwd: Forward, plan: AttentionPlan) -> torch.Tensor:
        """Keep keys and values, and attend: [T, heads * head_dim]."""
        q, k, v = made
        return attend(q, k, v, fwd, plan=plan, layer=self.layer)


@dataclass(frozen=True)
class DenseFfn:
    gate_up: ColumnLinear
    down: RowLinear
    ops: ModuleType

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.ops.swiglu(self.gate_up(x)))


@dataclass(frozen=True)
class ExpertFfn:
    router: Weight  # [num_experts, hidden], whole on every rank
    gate_up: torch.Tensor  # [num_experts, 2 * ffn / tp, hidden]
    down: torch.Tensor  # [num_experts, hidden, ffn / tp]
    count: int
    normalize: bool
    tp: Group
    ops: ModuleType

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        ops = self.ops
        weights, experts = ops.choose_experts(
            ops.linear(x, self.router), self.count, normalize=self.normalize
        )
        return self.tp.all_reduce(ops.mix_experts(x, self.gate_up, self.down, weights, experts))


@dataclass(frozen=True)
class Layer:
    attn_norm: torch.Tensor
    attn: Attention
    mlp_norm: torch.Tensor
    mlp: DenseFfn | ExpertFfn
    eps: float
    window: int
    ops: ModuleType

    def __call__(self, x: torch.Tensor, fwd: Forward, table: Table, plan: AttentionPlan) -> torch.Tensor:
        return self._rest(x, self.attn(self.ops.rms_norm(x, self.attn_norm, self.eps), fwd, table, plan))

    def trunk(self, x: torch.Tensor, table: Table, cut: Cut) -> torch.Tensor:
        """As a call, but for what is left to `cut`."""
        made = self.attn.made(self.ops.rms_norm(x, self.attn_norm, self.eps), table)
        out = cut(made, lambda made, fwd, plans, _: self.attn.over(made, fwd, plans[self.window]))
        return self._rest(x, self.attn.out(out.flatten(1)))

    def _rest(self, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        x, normed = self.ops.add_rms_norm(x, seen, self.mlp_norm, self.eps)
        return x + self.mlp(normed)


class Llama:
    """One rank's part of the model. `load` before `forward`."""

    def __init__(self, cfg: ModelConfig, tp: Group, dtype: str = "f32", device: str = "cpu") -> None:
        """`dtype` is f32, bf16 or f16, for weights, activations and state. Raises ConfigError when tp does not fit."""
        self.cfg, self.tp, self.device = cfg, tp, device
        self.dtype = DTYPES[dtype]
        self._ops = kernels(device, self.dtype, head_dim=cfg.head_dim)
        self._sizes = sizes(cfg, tp.rank, tp.size)
        rope = frequencies(cfg.rope, cfg.head_dim, cfg.max_len)
        self._inverse = torch.tensor(rope.inverse, dtype=torch.float32, device=device)
        self._rope_scale = rope.scale
        self._layers: list[Layer] = []
        self._decoder: Any = None  # ops' own way through all layers, where it has one

    @property
    def replayable(self) -> bool:
        """Whether steps of any lengths read nothing back from the device (engine/replay.py)."""
        return self._ops.__name__ == "splitserve.ops.triton"

    def load(self, source: Source, progress: Callable[[float], None] | None = None) -> None:
        """Compile kernels, read this rank's part of the checkpoint; `progress` gets 0..1. Raises WeightsError."""
        report = progress or (lambda _: None)
        self._ops.prepare(lambda done: report(_COMPILING * done))
        checkpoint = open_checkpoint(source)
        p = load(
            checkpoint,
            expand(DECODER, checkpoint.format, self._sizes),
            dtype=self.dtype,
            device=self.device,
            interleaved=self.cfg.head_dim if self.cfg.interleaved else 0,
            optional=("lm_head.weight",) if self.cfg.tied_head else (),
            as_stored=self._ops.WIDENS,
            progress=lambda done: report(_COMPILING + (1 - _COMPILING) * done),
        )
        self._build(p)

    def load_dummy(self, seed: int = 0, progress: Callable[[float], None] | None = None) -> None:
        """Random weights of the configuration's shapes, made on the device: to measure speed with."""
        self._ops.prepare(progress or (lambda _: None))
        draw = torch.Generator(self.device).manual_seed(seed)
        p = {}
        for name, shape in expand(DECODER, "safetensors", self._sizes).shapes.items():
            p[name] = torch.empty(shape, dtype=self.dtype, device=self.device)
            if len(shape) == 1:
                p[name].fill_(0.0 if name.endswith("bias") else 1.0)
            else:
                p[name].normal_(0.0, shape[-1] ** -0.5, generator=draw)
        self._build(p)

    def _build(self, p: dict[str, torch.Tensor]) -> None:
        self._embed = Embedding(_matrix(p, "embed"), self.tp)
        self._layers = [self._layer(p, i) for i in range(self.cfg.num_layers)]
        self._decoder = _decoder(self._layers, self._ops)
        self._norm = p["norm"]
        self._head = Head(
            _matrix(p, "embed" if self.cfg.tied_head else "head"), self.cfg.vocab, self.tp, self._ops
        )

    @torch.inference_mode()
    def forward(self, fwd: Forward) -> torch.Tensor:
        """Logits [num_logits, vocab] float32, the same on every rank; the new rows are in the pages afterwards."""
        table = self._ops.rope_table(fwd.positions, self._inverse, self._rope_scale)
        x = self._embed(fwd.tokens).to(self.dtype)
        if self._decoder is not None:
            x = self._through(self._decoder, x, table, fwd)
        else:
            plans = self.begin(fwd)
            for layer in self._layers:
                x = layer(x, fwd, table, plans[layer.window])
                fwd.between_layers()
        return self.logits(x[fwd.logit_rows])

    def begin(self, fwd: Forward) -> dict[int, AttentionPlan]:
        """How the layers of each window read their pages in this pass."""
        return {w: plan_attention(fwd, self._ops, window=w) for w in {layer.window for layer in self._layers}}

    @torch.inference_mode()
    def trunk(self, tokens: torch.Tensor, positions: torch.Tensor, cut: Cut) -> torch.Tensor:
        """[T, hidden]: the layers, but for what is left to `cut` in each; `tokens` and `positions` are [T] int64."""
        table = self._ops.rope_table(positions, self._inverse, self._rope_scale)
        x = self._embed(tokens).to(self.dtype)
        for layer in self._layers:
            x = layer.trunk(x, table, cut)
        return x

    @torch.inference_mode()
    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """[n, hidden] -> [n, vocab] float32."""
        return self._head(self._ops.rms_norm(x, self._norm, self.cfg.eps))

    def _through(self, decoder: Any, x: torch.Tensor, table: Table, fwd: Forward) -> torch.Tensor:
        """All layers, each in two calls (ops/cpu/decoder.py)."""
        starts = tuple(a - b for a, b in zip(fwd.kv_lens, fwd.q_lens, strict=True))
        rows = self._ops.decoder.Rows(
            fwd.pages, starts, fwd.q_lens, fwd.write_page, fwd.write_row, fwd.page_tokens
        )
        run, pending = decoder.begin(x, table, rows), None
        for i, layer in enumerate(self._layers):
            assert isinstance(layer.mlp, DenseFfn)  # as _decoder has seen
            seen = layer.attn.out.added(run.attention(i, fwd.states.view("kv", i), pending))
            pending = layer.mlp.down.added(run.ffn(i, seen))
            fwd.between_layers()
        return run.end(pending)

    def _layer(self, p: dict[str, torch.Tensor], i: int) -> Layer:
        cfg, ops, at = self.cfg, self._ops, f"layers.{i}."
        attn = Attention(
            qkv=ColumnLinear(_matrix(p, at + "qkv.weight"), p.get(at + "qkv.bias"), ops),
            out=RowLinear(_matrix(p, at + "out.weight"), p.get(at + "out.bias"), self.tp, ops),
            q_norm=p.get(at + "q_norm"),
            k_norm=p.get(at + "k_norm"),
            head_dim=cfg.head_dim,
            kv_heads=len(self._sizes.local("kv")) // cfg.head_dim,
            eps=cfg.eps,
            layer=i,
            ops=ops,
        )
        return Layer(
            p[at + "attn_norm"], attn, p[at + "mlp_norm"], self._ffn(p, at), cfg.eps, cfg.window(i), ops
        )

    def _ffn(self, p: dict[str, torch.Tensor], at: str) -> DenseFfn | ExpertFfn:
        if at + "router" not in p:
            gate_up = ColumnLinear(_matrix(p, at + "gate_up.weight"), p.get(at + "gate_up.bias"), self._ops)
            down = RowLinear(_matrix(p, at + "down.weight"), p.get(at + "down.bias"), self.tp, self._ops)
            return DenseFfn(gate_up, down, self._ops)
        return ExpertFfn(
            _matrix(p, at + "router"),
            p[at + "experts.gate_up"],
            p[at + "experts.down"],
            count=self.cfg.num_experts_per_token,
            normalize=self.cfg.norm_experts,
            tp=self.tp,
            ops=self._ops,
        )


def _decoder(layers: Sequence[Layer], ops: ModuleType) -> Any:
    """`ops`' own way through these layers, or None where it has none or does not serve them."""
    if not ops.FUSES:
        return None
    weights = []
    for layer in layers:
        attn, mlp = layer.attn, layer.mlp
        if isinstance(mlp, ExpertFfn):
            return None
        matrices = (attn.qkv.weight, attn.out.weight, mlp.gate_up.weight, mlp.down.weight)
        norms = (layer.attn_norm, layer.mlp_norm)
        weights.append(
            ops.decoder.LayerWeights(
                matrices,
                norms,
                window=layer.window,
                qkv_bias=attn.qkv.bias,
                gate_up_bias=mlp.gate_up.bias,
                head_norms=None if attn.q_norm is None else (attn.q_norm, attn.k_norm),
            )
        )
    if not ops.decoder.serves(weights):
        return None
    first = layers[0].attn
    heads = first.out.weight.shape[1] // first.head_dim
    return ops.decoder.Decoder(
        weights, heads=heads, kv_heads=first.kv_heads, size=first.head_dim, eps=first.eps
    )


def _matrix(p: dict[str, torch.Tensor], name: str) -> Weight:
    scales = p.get(name + SCALES)
    return p[name] if scales is None else Coded(p[name], scales)


def sizes(cfg: ModelConfig, rank: int, size: int) -> Sizes:
    """The axes of the naming rules and this rank's range of each. Raises ConfigError when heads cannot be shared out.

    Query heads divide evenly; KV heads as the state's pieces do, so that each rank has those its query heads read.
    """
    check_decoder(cfg, size)
    pieces = local_pieces(cfg.num_kv_heads, rank, size)
    heads = cfg.num_heads // size
    share = -(-cfg.vocab // size)
    d = cfg.head_dim
    return Sizes(
        lengths={
            "hidden": cfg.hidden,
            "q": cfg.num_heads * d,
            "kv": cfg.num_kv_heads * d,
            "head_dim": d,
            "ffn": cfg.ffn,
            "vocab": cfg.vocab,
            "experts": cfg.num_experts,
            "expert_ffn": cfg.expert_ffn,
        },
        ranges={
            "q": range(rank * heads * d, (rank + 1) * heads * d),
            "kv": range(pieces.start * d, pieces.stop * d),
            "ffn": _share(cfg.ffn, rank, size),
            "expert_ffn": _share(cfg.expert_ffn, rank, size),
            "vocab": range(rank * share, (rank + 1) * share),
        },
        num_layers=cfg.num_layers,
        features=lambda layer: _features(cfg, layer),
    )


def _share(length: int, rank: int, size: int) -> range:
    """Nearly equal contiguous shares; partial sums need no equal ones."""
    return range(length * rank // size, length * (rank + 1) // size)


def _features(cfg: ModelConfig, layer: int | None) -> set[str]:
    present = {
        "head": not cfg.tied_head,
        "qkv_bias": cfg.qkv_bias,
        "out_bias": cfg.out_bias,
        "mlp_bias": cfg.mlp_bias,
        "qk_norm": cfg.qk_norm,
        "moe": layer is not None and cfg.sparse(layer),
        "dense": layer is not None and not cfg.sparse(layer),
    }
    return {name for name, there in present.items() if there}
