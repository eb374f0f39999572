"""Naming rules as data: which tensor of a checkpoint becomes which part of which parameter, and how TP cuts it.

    file                                            parameter of rank r
    q_proj [q, hidden] ── rows of r's heads ──▶ ┐
    k_proj [kv, hidden] ─ rows of r's heads ──▶ ├ layers.3.qkv [q_r + kv_r + kv_r, hidden]
    v_proj [kv, hidden] ─ rows of r's heads ──▶ ┘

A rule names its axes ("q", "hidden"); `Sizes` says how long each axis is and which range of it this rank holds. There
is no code per architecture here: what a model lacks, its rules `need` and its features do not offer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

EXPERTS = "experts"
"""The axis that a checkpoint may spread over one tensor an expert ({e} in the name)."""


@dataclass(frozen=True)
class Rule:
    """One line of a naming table. Rules of one parameter are joined along their output axis in table order."""

    parameter: str  # "{n}" is the layer
    safetensors: str
    gguf: str
    axes: tuple[str, ...]  # of the parameter; an expert stack begins with EXPERTS
    needs: str = ""  # a feature without which the rule does not apply
    rotated: bool = False  # rows that rotary embedding turns: some GGUF files interleave them


@dataclass(frozen=True)
class Sizes:
    """The axes of one model on one rank. An axis absent from `ranges` is held whole.

    A range may pass the end of its axis (a vocabulary padded to equal shares); what lies beyond is zero.
    """

    lengths: Mapping[str, int]
    ranges: Mapping[str, range]
    num_layers: int
    features: Callable[[int | None], Set[str]]  # of a layer, or of what is outside layers (None)

    def local(self, axis: str) -> range:
        return self.ranges.get(axis, range(self.lengths[axis]))


@dataclass(frozen=True)
class Placement:
    """Where one tensor of the file goes: `cuts` of it into `into` of the parameter."""

    parameter: str
    shape: tuple[int, ...]  # that the file must show
    cuts: tuple[range, ...]  # for each axis of the file's tensor
    into: tuple[int | slice, ...]
    rotated: bool = False


@dataclass(frozen=True)
class Expanded:
    """The rules of one model for one format and rank."""

    placements: dict[str, Placement]  # by the checkpoint's names
    shapes: dict[str, tuple[int, ...]]  # of this rank's parameters


def expand(rules: Sequence[Rule], format: str, sizes: Sizes) -> Expanded:
    """Apply a table to a model: every tensor it must have, and every parameter this rank will hold. Pure."""
    placements: dict[str, Placement] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for layer, rule in _applicable(rules, sizes):
        parameter = rule.parameter.format(n=layer)
        local = [len(sizes.local(a)) for a in rule.axes]
        joined = max(
            len(rule.axes) - 2, 0
        )  # output features: rows of a matrix, of each expert's matrix, of a vector
        before = shapes.get(parameter, (0,) * len(rule.axes))[joined]
        name = (rule.gguf if format == "gguf" else rule.safetensors).format(n=layer, e="{e}")
        for tensor, placement in _place(name, rule, sizes, joined=joined, at=before):
            placements[tensor] = Placement(parameter, *placement, rotated=rule.rotated)
        local[joined] += before
        shapes[parameter] = tuple(local)
    return Expanded(placements, shapes)


def _applicable(rules: Sequence[Rule], sizes: Sizes) -> Iterator[tuple[int | None, Rule]]:
    for rule in rules:
        layers: Sequence[int | None] = range(sizes.num_layers) if "{n}" in rule.parameter else [None]
        for layer in layers:
            if not rule.needs or rule.needs in sizes.features(layer):
                yield layer, rule


def _place(
    name: str, rule: Rule, sizes: Sizes, *, joined: int, at: int
) -> Iterator[tuple[str, tuple[tuple[int, ...], tuple[range, ...], tuple[int | slice, ...]]]]:
    """(tensor name, (shape, cuts, into)) of one rule: one, or one for each expert."""
    shape = tuple(sizes.lengths[a] for a in rule.axes)
    cuts = tuple(_clipped(sizes.local(a), sizes.lengths[a]) for a in rule.axes)
    into = tuple(slice(at, at + len(c)) if i == joined else slice(0, len(c)) for i, c in enumerate(cuts))
    if "{e}" not in name:
        yield name, (shape, cuts, into)
        return
    for slot, expert in enumerate(cuts[0]):
        yield name.format(e=expert), (shape[1:], cuts[1:], (slot, *into[1:]))


def _clipped(part: range, length: int) -> range:
    return range(min(part.start, length), min(part.stop, length))


DECODER: tuple[Rule, ...] = (
    Rule("embed", "model.embed_tokens.weight", "token_embd.weight", ("vocab", "hidden")),
    Rule("norm", "model.norm.weight", "output_norm.weight", ("hidden",)),
    Rule("head", "lm_head.weight", "output.weight", ("vocab", "hidden"), needs="head"),
    Rule(
        "layers.{n}.attn_norm",
        "model.layers.{n}.input_layernorm.weight",
        "blk.{n}.attn_norm.weight",
        ("hidden",),
    ),
    *(
        Rule(
            "layers.{n}.qkv." + kind,
            f"model.layers.{{n}}.self_attn.{x}_proj.{kind}",
            f"blk.{{n}}.attn_{x}.{kind}",
            ("q" if x == "q" else "kv", "hidden")[: 2 if kind == "weight" else 1],
            needs="" if kind == "weight" else "qkv_bias",
            rotated=x != "v",
        )
        for kind in ("weight", "bias")
        for x in "qkv"
    ),
    *(
        Rule(
            f"layers.{{n}}.{x}_norm",
            f"model.layers.{{n}}.self_attn.{x}_norm.weight",
            f"blk.{{n}}.attn_{x}_norm.weight",
            ("head_dim",),
            needs="qk_norm",
        )
        for x in "qk"
    ),
    Rule(
        "layers.{n}.out.weight",
        "model.layers.{n}.self_attn.o_proj.weight",
        "blk.{n}.attn_output.weight",
        ("hidden", "q"),
    ),
    Rule(
        "layers.{n}.out.bias",
        "model.layers.{n}.self_attn.o_proj.bias",
        "blk.{n}.attn_output.bias",
        ("hidden",),
        needs="out_bias",
    ),
    Rule(
        "layers.{n}.mlp_norm",
        "model.layers.{n}.post_attention_layernorm.weight",
        "blk.{n}.ffn_norm.weight",
        ("hidden",),
    ),
    *(
        Rule(
            f"layers.{{n}}.{'down' if x == 'down' else 'gate_up'}.{kind}",
            f"model.layers.{{n}}.mlp.{x}_proj.{kind}",
            f"blk.{{n}}.ffn_{x}.{kind}",
            (("hidden", "ffn") if x == "down" else ("ffn", "hidden"))[: 2 if kind == "weight" else 1],
            needs="dense" if kind == "weight" else "mlp_bias",
        )
        for kind in ("weight", "bias")
        for x in ("gate", "up", "down")
    ),
    Rule(
        "layers.{n}.router",
        "model.layers.{n}.mlp.gate.weight",
        "blk.{n}.ffn_gate_inp.weight",
        ("experts", "hidden"),
        needs="moe",
    ),
    *(
        Rule(
            f"layers.{{n}}.experts.{'down' if x == 'down' else 'gate_up'}",
            f"model.layers.{{n}}.mlp.experts.{{e}}.{x}_proj.weight",
            f"blk.{{n}}.ffn_{x}_exps.weight",
            (EXPERTS, "hidden", "expert_ffn") if x == "down" else (EXPERTS, "expert_ffn", "hidden"),
            needs="moe",
        )
        for x in ("gate", "up", "down")
    ),
)
"""Llama, SmolLM2, Mistral, Qwen2, Qwen3 and Qwen3-MoE, dense and sparse."""

IGNORED: tuple[str, ...] = (
    r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",  # old exports: a table that follows from the config
    r"rope_freqs\.weight",  # GGUF: read with the configuration
)
"""Tensors that may be present and are not weights (regular expressions over whole names)."""
