"""DeepSeek-V4's checkpoint as data: which tensors of DeepSeek's original format become which parameters. Pure.

    file                                                    parameter of a rank
    layers.3.attn.wq_a.weight [q_lora, D]   ─ all rows ──▶ ┐ layers.3.qkv_a [q_lora + d, D]
    layers.3.attn.wkv.weight  [d, D]        ─ all rows ──▶ ┘
    layers.3.ffn.experts.7.w1.weight [F, D] ─ rank's rows ▶ layers.3.experts.gate_up[7] [2 F / tp, D]
    layers.3.ffn.experts.7.w3.weight [F, D] ─ rank's rows ▶

Cut by heads: wq_b, attn_sink, wo_a (rows), wo_b (columns). Cut by features: all experts (or, with `whole_experts`, the
routed ones by expert). Cut by tokens: embed and head. The rest is on every rank. Quantised tensors have a sibling
`.scale`, which follows its weight (weights/parameters.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from splitserve.weights.parameters import Form, Parameter, Part

from .deepseek_v4_config import CSA, SWA, DeepseekV4Config
from .shares import check_deepseek_v4


@dataclass(frozen=True)
class Share:
    """What one rank of a group holds. Raises ConfigError where tp does not divide what must be divided."""

    rank: int
    size: int
    whole_experts: bool = (
        False  # routed experts are dealt out whole, instead of a slice of each on every rank
    )

    def check(self, cfg: DeepseekV4Config) -> None:
        check_deepseek_v4(cfg, self.size, whole_experts=self.whole_experts)

    def of(self, length: int) -> range:
        part = length // self.size
        return range(self.rank * part, (self.rank + 1) * part)

    def experts(self, cfg: DeepseekV4Config) -> range:
        return self.of(cfg.num_experts) if self.whole_experts else range(cfg.num_experts)

    def expert_features(self, cfg: DeepseekV4Config) -> range:
        return range(cfg.expert_ffn) if self.whole_experts else self.of(cfg.expert_ffn)


def parameters(
    cfg: DeepseekV4Config, share: Share, *, expert_form: Form = Form.MXFP4, draft: bool = True
) -> list[Parameter]:
    """Every parameter that a rank holds, in the order of the file's layers; those of MTP only with `draft`.

    `expert_form` is MXFP4, or TILES in -Base.
    """
    vocab = -(-cfg.vocab // share.size)
    tokens = range(share.rank * vocab, (share.rank + 1) * vocab)
    wanted = [
        Parameter("embed", Form.DENSE, ((Part("embed.weight", (cfg.vocab, cfg.hidden), tokens),),)),
        *_tail("", cfg),
        Parameter("head", Form.DENSE, ((Part("head.weight", (cfg.vocab, cfg.hidden), tokens),),)),
    ]
    layer_of = partial(_layer, cfg=cfg, share=share, expert_form=expert_form)
    for layer in range(cfg.num_layers):
        wanted += layer_of(f"layers.{layer}.", f"layers.{layer}.", layer=layer)
    if cfg.num_mtp and draft:
        wanted += layer_of("mtp.", "mtp.0.", layer=cfg.num_layers)
        wanted += _tail("mtp.", cfg, "mtp.0.")
        wanted += [
            _whole(f"mtp.{n}", f"mtp.0.{n}.weight", Form.TILES, (cfg.hidden,) * 2)
            for n in ("e_proj", "h_proj")
        ]
        wanted += [
            _whole(f"mtp.{n}", f"mtp.0.{n}.weight", Form.F32, (cfg.hidden,)) for n in ("enorm", "hnorm")
        ]
    return wanted


def _whole(name: str, tensor: str, form: Form, shape: tuple[int, ...]) -> Parameter:
    return Parameter(name, form, ((Part(tensor, shape),),))


def _tail(name: str, cfg: DeepseekV4Config, tensors: str = "") -> Iterator[Parameter]:
    """What turns streams into logits, but for the head itself."""
    n = cfg.streams
    yield _whole(f"{name}norm", f"{tensors}norm.weight", Form.F32, (cfg.hidden,))
    yield _whole(f"{name}hc_head.fn", f"{tensors}hc_head_fn", Form.F32, (n, n * cfg.hidden))
    yield _whole(f"{name}hc_head.base", f"{tensors}hc_head_base", Form.F32, (n,))
    yield _whole(f"{name}hc_head.scale", f"{tensors}hc_head_scale", Form.F32, (1,))


def _layer(
    name: str, tensors: str, *, layer: int, cfg: DeepseekV4Config, share: Share, expert_form: Form
) -> Iterator[Parameter]:
    n = cfg.streams
    for sub in ("attn", "ffn"):
        yield _whole(f"{name}{sub}_norm", f"{tensors}{sub}_norm.weight", Form.F32, (cfg.hidden,))
        yield _whole(f"{name}hc_{sub}.fn", f"{tensors}hc_{sub}_fn", Form.F32, (n * (2 + n), n * cfg.hidden))
        yield _whole(f"{name}hc_{sub}.base", f"{tensors}hc_{sub}_base", Form.F32, (n * (2 + n),))
        yield _whole(f"{name}hc_{sub}.scale", f"{tensors}hc_{sub}_scale", Form.F32, (3,))
    yield from _attention(name, f"{tensors}attn.", cfg, share)
    ratio = cfg.ratios[layer]
    if ratio != SWA:
        yield from _compressor(
            f"{name}compressor", f"{tensors}attn.compressor.", ratio, cfg.head_dim, cfg.hidden
        )
    if ratio == CSA:
        yield from _indexer(f"{name}indexer", f"{tensors}attn.indexer.", cfg)
    yield from _experts(name, f"{tensors}ffn.", layer=layer, cfg=cfg, share=share, form=expert_form)


def _attention(name: str, at: str, cfg: DeepseekV4Config, share: Share) -> Iterator[Parameter]:
    hidden, q_lora, d = cfg.hidden, cfg.q_lora, cfg.head_dim
    heads, groups = share.of(cfg.num_heads), share.of(cfg.out_groups)
    per_group = cfg.num_heads // cfg.out_groups * d
    mixed = cfg.out_groups * cfg.out_lora
    out_rows = range(groups.start * cfg.out_lora, groups.stop * cfg.out_lora)
    yield Parameter(
        f"{name}qkv_a",
        Form.TILES,
        ((Part(f"{at}wq_a.weight", (q_lora, hidden)), Part(f"{at}wkv.weight", (d, hidden))),),
    )
    yield _whole(f"{name}q_norm", f"{at}q_norm.weight", Form.F32, (q_lora,))
    yield _whole(f"{name}kv_norm", f"{at}kv_norm.weight", Form.F32, (d,))
    q_rows = range(heads.start * d, heads.stop * d)
    for parameter, form, part in (
        ("q_b", Form.TILES, Part(f"{at}wq_b.weight", (cfg.num_heads * d, q_lora), q_rows)),
        ("sink", Form.F32, Part(f"{at}attn_sink", (cfg.num_heads,), heads)),
        ("out_a", Form.TILES, Part(f"{at}wo_a.weight", (mixed, per_group), out_rows)),
        ("out_b", Form.TILES, Part(f"{at}wo_b.weight", (hidden, mixed), None, out_rows)),
    ):
        yield Parameter(name + parameter, form, ((part,),))


def _compressor(name: str, at: str, ratio: int, width: int, hidden: int) -> Iterator[Parameter]:
    """One product gives a token's whole row: [kv A | score A | kv B | score B], or [kv | score] for ratio 128."""
    halves = [range(width), range(width, 2 * width)] if ratio == CSA else [range(width)]
    shape = (len(halves) * width, hidden)
    parts = tuple(Part(f"{at}{which}.weight", shape, rows) for rows in halves for which in ("wkv", "wgate"))
    yield Parameter(f"{name}.weight", Form.DENSE, (parts,))
    yield _whole(f"{name}.ape", f"{at}ape", Form.F32, (ratio, len(halves) * width))
    yield _whole(f"{name}.norm", f"{at}norm.weight", Form.F32, (width,))


def _indexer(name: str, at: str, cfg: DeepseekV4Config) -> Iterator[Parameter]:
    heads, dim = cfg.index_heads, cfg.index_dim
    yield _whole(f"{name}.q_b", f"{at}wq_b.weight", Form.TILES, (heads * dim, cfg.q_lora))
    yield _whole(f"{name}.weights", f"{at}weights_proj.weight", Form.DENSE, (heads, cfg.hidden))
    yield from _compressor(f"{name}.compressor", f"{at}compressor.", CSA, dim, cfg.hidden)


def _experts(
    name: str, at: str, *, layer: int, cfg: DeepseekV4Config, share: Share, form: Form
) -> Iterator[Parameter]:
    hidden, ffn = cfg.hidden, cfg.expert_ffn
    yield _whole(f"{name}gate", f"{at}gate.weight", Form.DENSE, (cfg.num_experts, hidden))
    if layer < cfg.num_hash_layers:
        shape = (cfg.vocab, cfg.num_experts_per_token)
        yield _whole(f"{name}experts_of_token", f"{at}gate.tid2eid", Form.INT, shape)
    else:
        yield _whole(f"{name}gate_bias", f"{at}gate.bias", Form.F32, (cfg.num_experts,))

    def gate_up(prefix: str, rows: range) -> tuple[Part, ...]:
        return tuple(Part(f"{prefix}{w}.weight", (ffn, hidden), rows) for w in ("w1", "w3"))

    def down(prefix: str, columns: range) -> tuple[Part, ...]:
        return (Part(f"{prefix}w2.weight", (hidden, ffn), None, columns),)

    features = share.expert_features(cfg)
    routed = [f"{at}experts.{e}." for e in share.experts(cfg)]
    yield Parameter(f"{name}experts.gate_up", form, tuple(gate_up(e, features) for e in routed))
    yield Parameter(f"{name}experts.down", form, tuple(down(e, features) for e in routed))
    shared = share.of(ffn)
    yield Parameter(f"{name}shared.gate_up", Form.TILES, (gate_up(f"{at}shared_experts.", shared),))
    yield Parameter(f"{name}shared.down", Form.TILES, (down(f"{at}shared_experts.", shared),))
