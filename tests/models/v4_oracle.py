"""transformers' DeepSeek-V4 on our checkpoints, and what tests of the model share.

The checkpoint is dequantised here from its bytes, by a dequantiser that shares nothing with ours, and renamed.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from splitserve.dist.group import SoloGroup
from splitserve.kv.pool import Pool
from splitserve.layers.forward import Forward, Group
from splitserve.models import registry
from splitserve.models.deepseek_v4 import DeepseekV4
from splitserve.models.read import read_config
from splitserve.spec import lay_out
from splitserve.weights.locate import locate

PAGE = 128

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def dequantised(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint in float32 (tid2eid in int64) under its original name, scales folded in."""
    raw: dict[str, torch.Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        raw |= load_file(file)
    out = {}
    for name, tensor in raw.items():
        scale = raw.get(name.removesuffix("weight") + "scale") if name.endswith(".weight") else None
        if name.endswith(".scale") and name.removesuffix("scale") + "weight" in raw:
            continue
        if scale is None:
            out[name] = tensor if tensor.dtype == torch.int64 else tensor.float()
            continue
        factor = scale if scale.dtype == torch.float32 else 2.0 ** (scale.view(torch.uint8).double() - 127)
        if tensor.dtype == torch.int8:
            bits = tensor.numpy().view("uint8").astype("int64")
            pairs = torch.stack([torch.from_numpy(bits % 16), torch.from_numpy(bits // 16)], -1).flatten(-2)
            out[name] = (torch.tensor(E2M1)[pairs].double() * factor.repeat_interleave(32, 1)).float()
        else:
            rows, columns = tensor.shape
            grid = factor.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
            out[name] = (tensor.double() * grid).float()
    return out


def transformers_model(path: Path) -> Any:
    """The checkpoint as transformers' model, in float32, without its MTP block."""
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    values = json.loads((path / "config.json").read_text())
    config = DeepseekV4Config(
        **{k: v for k, v in values.items() if k not in ("quantization_config", "torch_dtype")}
    )
    config._attn_implementation = "eager"
    with torch.device("meta"):
        model = DeepseekV4ForCausalLM(config)
    model = DeepseekV4ForCausalLM(config).eval()
    weights = _renamed(dequantised(path), config.n_routed_experts)
    missing, extra = model.load_state_dict(weights, strict=False)
    assert not extra, extra
    assert not missing, missing
    return model.float()


def _renamed(weights: dict[str, torch.Tensor], num_experts: int) -> dict[str, torch.Tensor]:
    out: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        if name.startswith("mtp.") or ".ffn.experts." in name:
            continue
        out[_rename(name)] = tensor
    layers = {n.split(".ffn.")[0] for n in weights if ".ffn.experts." in n and not n.startswith("mtp.")}
    for layer in layers:
        e = [f"{layer}.ffn.experts.{i}." for i in range(num_experts)]
        both = [torch.cat((weights[p + "w1.weight"], weights[p + "w3.weight"])) for p in e]
        out[f"model.{layer}.mlp.experts.gate_up_proj"] = torch.stack(both)
        out[f"model.{layer}.mlp.experts.down_proj"] = torch.stack([weights[p + "w2.weight"] for p in e])
    return out


_NAMES = (
    ("embed.weight", "embed_tokens.weight"),
    ("hc_head_", "hc_head.hc_"),
    (".attn_norm.", ".input_layernorm."),
    (".ffn_norm.", ".post_attention_layernorm."),
    (".hc_attn_", ".attn_hc."),
    (".hc_ffn_", ".ffn_hc."),
    (".attn.attn_sink", ".self_attn.sinks"),
    (".attn.indexer.compressor.", ".self_attn.compressor.indexer."),
    (".attn.indexer.wq_b", ".self_attn.compressor.indexer.q_b_proj"),
    (".attn.indexer.weights_proj", ".self_attn.compressor.indexer.scorer.weights_proj"),
    (".attn.", ".self_attn."),
    (".wq_a.", ".q_a_proj."),
    (".q_norm.", ".q_a_norm."),
    (".wq_b.", ".q_b_proj."),
    (".wo_a.", ".o_a_proj."),
    (".wo_b.", ".o_b_proj."),
    (".wkv.", ".kv_proj."),
    (".wgate.", ".gate_proj."),
    (".ape", ".position_bias"),
    (".compressor.norm.", ".compressor.kv_norm."),
    (".indexer.norm.", ".indexer.kv_norm."),
    (".ffn.gate.bias", ".mlp.gate.e_score_correction_bias"),
    (".ffn.shared_experts.w1.", ".mlp.shared_experts.gate_proj."),
    (".ffn.shared_experts.w3.", ".mlp.shared_experts.up_proj."),
    (".ffn.shared_experts.w2.", ".mlp.shared_experts.down_proj."),
    (".ffn.", ".mlp."),
)


def _rename(name: str) -> str:
    if name == "head.weight":
        return "lm_head.weight"
    for old, new in _NAMES:
        name = name.replace(old, new)
    return "model." + name


@dataclass
class Text:
    """One request of a test: its tokens, its pages and slot, and how many tokens have state."""

    tokens: list[int]
    pages: list[int]
    slot: int
    done: int = 0


def random_text(length: int, *, vocab: int = 512, seed: int = 0, first_page: int = 1, slot: int = 0) -> Text:
    draw = random.Random(seed)
    pages = list(range(first_page, first_page + -(-length // PAGE)))
    draw.shuffle(pages)
    return Text([draw.randrange(vocab) for _ in range(length)], pages, slot)


@dataclass
class Bench:
    """A model on one rank with poisoned state: a row that is read and was never written gives NaN."""

    model: DeepseekV4
    pool: Pool
    tp: Group = field(default_factory=SoloGroup)

    def step(self, chunks: Sequence[tuple[Text, int]]) -> torch.Tensor:
        """Compute the next n tokens of each text; logits of all their tokens, one-token chunks first."""
        return self.model.forward(forward_of(chunks, self.pool, self.tp))

    def run(self, text: Text, sizes: Sequence[int]) -> torch.Tensor:
        """Logits of all tokens of one text, computed in chunks of `sizes`."""
        return torch.cat([self.step([(text, n)]) for n in sizes])


def load_model(path: Path, tp: Group | None = None, dtype: str = "f32") -> DeepseekV4:
    source = locate(path)
    model = registry.build(read_config(source), tp or SoloGroup(), dtype=dtype)
    model.load(source)
    assert isinstance(model, DeepseekV4)
    return model


def make_bench(
    model: DeepseekV4, *, num_pages: int = 32, num_slots: int = 8, dtype: str = "f32", **kw: Any
) -> Bench:
    specs = registry.family(model.cfg).states(model.cfg, dtype=dtype, **kw)
    tp = model.tp
    pool = Pool(
        specs,
        layout=lay_out(specs, page_tokens=PAGE, rank=tp.rank, size=tp.size),
        num_pages=num_pages,
        num_slots=num_slots,
        device="cpu",
        allocate=lambda nbytes: torch.empty(nbytes, dtype=torch.uint8),
    )
    pool.poison(range(num_pages), range(num_slots))
    return Bench(model, pool, tp)


def forward_of(chunks: Sequence[tuple[Text, int]], states: Any, tp: Group) -> Forward:
    """The step that computes the next n tokens of each (text, n), with logits for all of them; advances the texts."""
    chunks = sorted(chunks, key=lambda c: c[1] != 1)
    tokens, positions, page, row = [], [], [], []
    for text, n in chunks:
        for t in range(text.done, text.done + n):
            tokens.append(text.tokens[t])
            positions.append(t)
            page.append(text.pages[t // PAGE])
            row.append(t % PAGE)
        text.done += n
    q_lens = [n for _, n in chunks]
    most = max(len(text.pages) for text, _ in chunks)
    ints = torch.tensor
    return Forward(
        tokens=ints(tokens),
        positions=ints(positions),
        logit_rows=torch.arange(len(tokens)),
        q_start=ints([0, *q_lens]).cumsum(0),
        q_lens=tuple(q_lens),
        kv_lens=tuple(text.done for text, _ in chunks),
        num_decode=sum(n == 1 for n in q_lens),
        pages=ints([text.pages + [0] * (most - len(text.pages)) for text, _ in chunks]),
        slots=ints([text.slot for text, _ in chunks]),
        write_page=ints(page),
        write_row=ints(row),
        page_tokens=PAGE,
        states=states,
        tp=tp,
    )
