"""DeepSeek-V4: window, compressed and sparse attention over one latent, hyper-connections, hash and routed experts.

    streams = embed(tokens), four times
    for each layer:   streams = mix(streams, attention(norm(collapse(streams))))
                      streams = mix(streams, experts(norm(collapse(streams)), tokens))
    logits = head(norm(collapse(streams)[logit_rows]))

docs/deepseek_v4.md goes through it part by part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from splitserve.errors import ConfigError
from splitserve.layers.forward import Cut, Forward, Group
from splitserve.layers.linear import Embedding
from splitserve.layers.v4 import kernels as plain_kernels
from splitserve.layers.v4.attention import Attention
from splitserve.layers.v4.compressor import Compressor, bias_rows
from splitserve.layers.v4.experts import Experts
from splitserve.layers.v4.hyper import HyperConnection, HyperHead
from splitserve.layers.v4.indexer import Indexer
from splitserve.layers.v4.kernels import Gate, Table, Weight
from splitserve.layers.v4.plan import RopeFrequencies, StepPlan, plan_step
from splitserve.ops.ref.v4 import Mxfp4, Tiles
from splitserve.weights.load import DTYPES
from splitserve.weights.locate import Source
from splitserve.weights.parameters import Form, Parameter, check_checkpoint, read_parameters
from splitserve.weights.safetensors import SafetensorsDir

from .deepseek_v4_config import CSA, SWA, DeepseekV4Config
from .deepseek_v4_dummy import dummy_parameters
from .deepseek_v4_kernels import kernels_for
from .deepseek_v4_weights import Share, parameters
from .rope import frequencies


@dataclass(frozen=True)
class Layer:
    hc_attn: HyperConnection
    attn: Attention
    hc_ffn: HyperConnection
    ffn: Experts

    def __call__(self, streams: torch.Tensor, fwd: Forward, plan: Callable[[], StepPlan]) -> torch.Tensor:
        streams = self.hc_attn(streams, lambda x: self.attn(x, fwd, plan))
        return self.hc_ffn(streams, lambda x: self.ffn(x, fwd.tokens))

    def trunk(self, streams: torch.Tensor, tokens: torch.Tensor, table: Table, cut: Cut) -> torch.Tensor:
        streams = self.hc_attn(streams, lambda x: self.attn.trunk(x, table, cut))
        return self.hc_ffn(streams, lambda x: self.ffn(x, tokens))


@dataclass(frozen=True)
class Mtp:
    """One layer that looks a token further ahead: window only, learned router, a head of its own for the streams."""

    enorm: torch.Tensor  # [hidden] float32
    hnorm: torch.Tensor
    e_proj: Weight  # [hidden, hidden]
    h_proj: Weight
    layer: Layer
    head: HyperHead
    eps: float
    ops: Any

    def join(self, streams: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
        """[T, streams, hidden] of tokens and [T, hidden], embeddings of those after them -> the input streams."""
        ops = self.ops
        e = ops.linear(ops.rms_norm(after, self.enorm, self.eps), self.e_proj)
        h = ops.linear(ops.rms_norm(streams, self.hnorm, self.eps).flatten(0, 1), self.h_proj)
        return e[:, None] + h.view_as(streams)


class DeepseekV4:
    """One rank's part of the model. `load` before `forward`."""

    def __init__(
        self,
        cfg: DeepseekV4Config,
        tp: Group,
        dtype: str = "bf16",
        device: str = "cpu",
        *,
        whole_experts: bool = False,
        draft: bool = False,
    ) -> None:
        """`dtype` is of activations and of what the file does not quantise; `whole_experts` deals the routed experts
        out to the ranks instead of cutting each; `draft` loads the MTP layer. Raises ConfigError when tp does not fit,
        or when there is no MTP layer to load.
        """
        if draft and not cfg.num_mtp:
            raise ConfigError("this checkpoint has no MTP layer to draft with", field="speculative")
        self.cfg, self.tp, self.device = cfg, tp, device
        self.dtype = DTYPES[dtype]
        self._share = Share(tp.rank, tp.size, whole_experts)
        self._share.check(cfg)
        self.ops = kernels_for(cfg, device, self.dtype, tp=tp.size)
        self._rope = RopeFrequencies(
            *(
                torch.tensor(
                    frequencies(rope, cfg.rope_dim, cfg.max_len).inverse, dtype=torch.float32, device=device
                )
                for rope in (cfg.rope, cfg.compress_rope)
            )
        )
        self._draft = draft
        self._layers: list[Layer] = []

    @property
    def replayable(self) -> bool:
        """Whether steps of any lengths read nothing back from the device (engine/replay.py)."""
        return self.ops is not plain_kernels

    def load(self, source: Source, progress: Callable[[float], None] | None = None) -> None:
        """Read this rank's part of the checkpoint; `progress` gets 0..1. Raises WeightsError."""
        checkpoint = SafetensorsDir(source.path)
        form = expert_form(checkpoint)
        check_checkpoint(
            checkpoint,
            parameters(self.cfg, Share(0, 1), expert_form=form),
            may_have=() if self.cfg.num_mtp else ("mtp.",),
        )
        wanted = parameters(self.cfg, self._share, expert_form=form, draft=self._draft)
        p = read_parameters(
            checkpoint, wanted, dtype=self.dtype, device=self.device, progress=progress or _silent
        )
        self._build(_Weights(p, wanted, self.ops))

    def load_dummy(self, seed: int = 0, progress: Callable[[float], None] | None = None) -> None:
        """Random weights of the configuration's shapes, made on the device: to measure speed with."""
        wanted = parameters(self.cfg, self._share, draft=self._draft)
        p = dummy_parameters(
            wanted,
            num_experts=self.cfg.num_experts,
            dtype=self.dtype,
            device=self.device,
            seed=seed,
            progress=progress or _silent,
        )
        self._build(_Weights(p, wanted, self.ops))

    def forward(self, fwd: Forward) -> torch.Tensor:
        """Logits [num_logits, vocab] float32, the same on every rank; the new rows are in the state afterwards."""
        return self.logits(self.streams(fwd)[fwd.logit_rows])

    @torch.inference_mode()
    def streams(self, fwd: Forward) -> torch.Tensor:
        """[T, streams, hidden] after the last layer: what logits, and drafts, are made from."""
        plan = self.begin(fwd)
        streams = self._embed(fwd.tokens)[:, None].repeat(1, self.cfg.streams, 1)
        for layer in self._layers:
            streams = layer(streams, fwd, plan)
            fwd.between_layers()
        return streams

    def begin(self, fwd: Forward) -> Callable[[], StepPlan]:
        """What all layers of a pass share."""
        return self._plan(fwd, self.cfg.ratios[: self.cfg.num_layers])

    @torch.inference_mode()
    def trunk(self, tokens: torch.Tensor, positions: torch.Tensor, cut: Cut) -> torch.Tensor:
        """`streams`, but for what is left to `cut` in every layer; `tokens` and `positions` are [T] int64."""
        tables = [plain_kernels.rope_table(positions, self._rope.of(ratio)) for ratio in (SWA, CSA)]
        streams = self._embed(tokens)[:, None].repeat(1, self.cfg.streams, 1)
        for layer in self._layers:
            streams = layer.trunk(streams, tokens, tables[layer.attn.ratio != SWA], cut)
        return streams

    @torch.inference_mode()
    def logits(self, streams: torch.Tensor) -> torch.Tensor:
        """[n, streams, hidden] -> [n, vocab] float32."""
        return self._logits(self._hc_head(streams))

    @torch.inference_mode()
    def draft(self, streams: torch.Tensor, fwd: Forward) -> torch.Tensor:
        """[num_logits, vocab]: logits of the token after next, from `streams` [T, streams, hidden] of those positions.

        `fwd` is the step over the same positions, its tokens each the one AFTER the position's: slot i reads the
        streams of token i and the embedding of token i + 1, and writes the window of the MTP layer.
        """
        mixed = self._mtp.join(streams, self._embed(fwd.tokens))
        after = self._mtp.layer(mixed, fwd, self._plan(fwd, (SWA,)))
        if not len(fwd.logit_rows):  # a step inside a prompt: only the window was wanted
            return after.new_empty((0, self.cfg.vocab), dtype=torch.float32)
        return self._logits(self._mtp.head(after[fwd.logit_rows]))

    def _plan(self, fwd: Forward, ratios: Sequence[int]) -> Callable[[], StepPlan]:
        """Made next to the embedding; the first layer that asks waits for it."""
        cfg = self.cfg

        def plan() -> StepPlan:
            return plan_step(
                fwd,
                sorted(set(ratios)),
                window=cfg.window_len,
                index_topk=cfg.index_topk,
                rope=self._rope,
                kernels=self.ops,
            )

        made: Callable[[], StepPlan] = self.ops.beside(len(fwd.tokens), plan, lane=1)
        return made

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        """[n, hidden] -> [n, vocab] float32 on every rank, with float32 sums."""
        return self.tp.all_gather(self.ops.linear_f32(x, self._head), dim=-1)[:, : self.cfg.vocab]

    def _build(self, p: _Weights) -> None:
        plain_kernels.compile_loops(torch.device(self.device), self.dtype)
        self._embed = Embedding(p["embed"], self.tp)
        self._layers = [self._layer(p, f"layers.{i}.", i) for i in range(self.cfg.num_layers)]
        self._hc_head = self._hyper_head(p, "")
        self._head = p["head"]
        if self._draft:
            self._mtp = Mtp(
                p["mtp.enorm"],
                p["mtp.hnorm"],
                p.weight("mtp.e_proj"),
                p.weight("mtp.h_proj"),
                layer=self._layer(p, "mtp.", self.cfg.num_layers),
                head=self._hyper_head(p, "mtp."),
                eps=self.cfg.eps,
                ops=self.ops,
            )

    def _layer(self, p: _Weights, at: str, layer: int) -> Layer:
        return Layer(
            self._hyper(p, at, "attn"),
            self._attention(p, at, layer),
            self._hyper(p, at, "ffn"),
            self._experts(p, at),
        )

    def _hyper(self, p: _Weights, at: str, sub: str) -> HyperConnection:
        cfg, hc = self.cfg, f"{at}hc_{sub}."
        return HyperConnection(
            p[hc + "fn"],
            p[hc + "base"],
            p[hc + "scale"],
            norm=p[f"{at}{sub}_norm"],
            iters=cfg.sinkhorn_iters,
            hc_eps=cfg.hc_eps,
            eps=cfg.eps,
            tp=self.tp,
            ops=self.ops,
        )

    def _hyper_head(self, p: _Weights, at: str) -> HyperHead:
        hc = f"{at}hc_head."
        return HyperHead(
            p[hc + "fn"],
            p[hc + "base"],
            p[hc + "scale"],
            norm=p[at + "norm"],
            hc_eps=self.cfg.hc_eps,
            eps=self.cfg.eps,
            ops=self.ops,
        )

    def _attention(self, p: _Weights, at: str, layer: int) -> Attention:
        cfg, ratio = self.cfg, self.cfg.ratios[layer]
        state = "c4" if ratio == CSA else "c128"
        compressor = None if ratio == SWA else self._compressor(p, f"{at}compressor", state, layer)
        rows = [] if ratio == SWA else [p[f"{at}compressor.weight"]]
        if ratio == CSA:
            rows += [p[f"{at}indexer.compressor.weight"], p[f"{at}indexer.weights"]]
        return Attention(
            qkv_a=p.weight(at + "qkv_a"),
            q_norm=p[at + "q_norm"],
            q_b=p.weight(at + "q_b"),
            kv_norm=p[at + "kv_norm"],
            sink=p[at + "sink"],
            out_a=p.weight(at + "out_a"),
            out_b=p.weight(at + "out_b"),
            groups=cfg.out_groups // self.tp.size,
            rows=torch.cat(rows) if rows else None,
            compressor=compressor,
            indexer=self._indexer(p, f"{at}indexer", layer) if ratio == CSA else None,
            ratio=ratio,
            rope_dim=cfg.rope_dim,
            eps=cfg.eps,
            layer=layer,
            ops=self.ops,
        )

    def _compressor(self, p: _Weights, at: str, state: str, layer: int) -> Compressor:
        halves = 1 if state == "c128" else 2
        bias = bias_rows(p[at + ".ape"], halves)
        gate = Gate(bias, p[at + ".norm"], self.cfg.eps)
        return Compressor(gate, state, layer, self.dtype, self.ops)

    def _indexer(self, p: _Weights, at: str, layer: int) -> Indexer:
        compressor = self._compressor(p, at + ".compressor", "index", layer)
        cfg = self.cfg
        return Indexer(p.weight(at + ".q_b"), compressor, cfg.index_heads, cfg.index_topk, self.ops)

    def _experts(self, p: _Weights, at: str) -> Experts:
        cfg = self.cfg
        return Experts(
            gate=p[at + "gate"],
            gate_bias=p.get(at + "gate_bias"),
            experts_of_token=p.get(at + "experts_of_token"),
            gate_up=p.weight(at + "experts.gate_up"),
            down=p.weight(at + "experts.down"),
            shared_gate_up=p.weight(at + "shared.gate_up"),
            shared_down=p.weight(at + "shared.down"),
            local=self._share.experts(cfg),
            count=cfg.num_experts_per_token,
            route_scale=cfg.route_scale,
            limit=cfg.swiglu_limit,
            ops=self.ops,
        )


def _silent(done: float) -> None:
    """Progress that nobody watches."""


def expert_form(checkpoint: SafetensorsDir) -> Form:
    """How the routed experts lie in the file: early copies of config.json do not say, so the tensors do."""
    name = "layers.0.ffn.experts.0.w1.weight"
    return Form.TILES if name in checkpoint.names() and checkpoint.dtype(name) == "F8_E4M3" else Form.MXFP4


class _Weights:
    """Loaded parameters by name; quantised ones come back with their scales."""

    def __init__(self, parameters: dict[str, torch.Tensor], wanted: Sequence[Parameter], ops: Any) -> None:
        self._parameters = parameters
        self._ops = ops
        self._tiles = {w.name: w.tile for w in wanted if w.form is Form.TILES}

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._parameters[name]

    def get(self, name: str) -> torch.Tensor | None:
        return self._parameters.get(name)

    def weight(self, name: str) -> Any:
        """In the form that the kernels read; the file's form goes."""
        scales = self._parameters.pop(f"{name}.scales", None)
        codes = self._parameters.pop(name)
        if scales is None:
            return self._ops.prepare(codes)
        if name in self._tiles:
            return self._ops.prepare(Tiles(codes, scales, self._tiles[name]))
        return self._ops.prepare(Mxfp4(codes, scales))
