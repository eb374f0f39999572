"""The MTP layer against a forward pass of its own, and drafts taken back: what a rejected token wrote is never seen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from splitserve.dist.group import SoloGroup
from splitserve.errors import ConfigError
from splitserve.models.deepseek_v4 import DeepseekV4
from splitserve.models.make_checkpoint import TINY, write_checkpoint
from splitserve.models.read import read_config
from splitserve.weights.locate import locate
from tests.models.v4_oracle import Bench, Text, dequantised, forward_of, make_bench, random_text

EPS = 1e-6


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("tiny")
    write_checkpoint(path, TINY)
    return path


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> DeepseekV4:
    source = locate(checkpoint)
    model = DeepseekV4(read_config(source), SoloGroup(), "f32", draft=True)
    model.load(source)
    return model


def rms(x: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
    x = x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt()
    return x if weight is None else x * weight


class Reference:
    """The MTP layer over a whole text, from the model's description, with the numbers of TINY and nothing of ours."""

    def __init__(self, path: Path) -> None:
        self.w = {k.removeprefix("mtp.0."): v for k, v in dequantised(path).items() if k.startswith("mtp.0.")}
        self.embed, self.head = (dequantised(path)[n] for n in ("embed.weight", "head.weight"))

    def logits(self, streams: torch.Tensor, after: list[int]) -> torch.Tensor:
        w = self.w
        e = rms(self.embed[after], w["enorm.weight"]) @ w["e_proj.weight"].T
        h = e[:, None] + rms(streams, w["hnorm.weight"]) @ w["h_proj.weight"].T
        for sub, run in (("attn", self.attention), ("ffn", self.experts)):
            pre, post, comb = self.coefficients(h, f"hc_{sub}")
            y = run(rms((pre[..., None] * h).sum(1), w[f"{sub}_norm.weight"]))
            h = post[..., None] * y[:, None] + torch.einsum("tjk,tjd->tkd", comb, h)
        mixes = rms(h.flatten(1)) @ w["hc_head_fn"].T
        pre = torch.sigmoid(mixes * w["hc_head_scale"] + w["hc_head_base"]) + EPS
        return rms((pre[..., None] * h).sum(1), w["norm.weight"]) @ self.head.T

    def coefficients(self, h: torch.Tensor, p: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        m, base, scale = rms(h.flatten(1)) @ self.w[p + "_fn"].T, self.w[p + "_base"], self.w[p + "_scale"]
        pre = torch.sigmoid(m[:, :4] * scale[0] + base[:4]) + EPS
        post = 2 * torch.sigmoid(m[:, 4:8] * scale[1] + base[4:8])
        comb = (m[:, 8:] * scale[2] + base[8:]).view(-1, 4, 4).softmax(-1) + EPS
        for i in range(20):
            if i:
                comb = comb / (comb.sum(2, keepdim=True) + EPS)
            comb = comb / (comb.sum(1, keepdim=True) + EPS)
        return pre, post, comb

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        w, t = self.w, torch.arange(len(x))
        turn = torch.polar(torch.ones(len(x), 8), t[:, None] * 10000.0 ** (-torch.arange(8) / 8))

        def rope(v: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
            pairs = torch.view_as_complex(v[..., 48:].unflatten(-1, (-1, 2)).contiguous())
            return torch.cat((v[..., :48], torch.view_as_real(pairs * turn[:, None]).flatten(-2)), -1)

        latent = rms(x @ w["attn.wq_a.weight"].T, w["attn.q_norm.weight"])
        q = rope(rms((latent @ w["attn.wq_b.weight"].T).view(-1, 8, 64)), turn)
        kv = rope(rms(x @ w["attn.wkv.weight"].T, w["attn.kv_norm.weight"])[:, None], turn)[:, 0]
        seen = (t <= t[:, None]) & (t > t[:, None] - 16)
        logits = (torch.einsum("thd,kd->thk", q, kv) / 8).masked_fill(~seen[:, None], -torch.inf)
        sink = w["attn.attn_sink"][None, :, None].expand(len(x), 8, 1)
        out = torch.einsum("thk,kd->thd", torch.cat((logits, sink), -1).softmax(-1)[..., :-1], kv)
        out = rope(out, turn.conj()).reshape(-1, 2, 256)
        mixed = torch.einsum("tgd,god->tgo", out, w["attn.wo_a.weight"].view(2, 128, 256))
        return mixed.flatten(1) @ w["attn.wo_b.weight"].T

    def experts(self, x: torch.Tensor) -> torch.Tensor:
        w = self.w
        scores = torch.nn.functional.softplus(x @ w["ffn.gate.weight"].T).sqrt()
        chosen = (scores + w["ffn.gate.bias"]).topk(2, -1).indices
        weights = scores.gather(1, chosen)
        weights = 1.5 * weights / weights.sum(-1, keepdim=True)

        def run(x: torch.Tensor, p: str) -> torch.Tensor:
            gate, up = ((x @ w[f"ffn.{p}.{n}.weight"].T) for n in ("w1", "w3"))
            return (torch.nn.functional.silu(gate.clamp(max=10)) * up.clamp(-10, 10)) @ w[
                f"ffn.{p}.w2.weight"
            ].T

        routed = [
            sum(weights[t, j] * run(x[t], f"experts.{chosen[t, j]}") for j in range(2)) for t in range(len(x))
        ]
        return torch.stack(routed) + run(x, "shared_experts")


def drafts(bench: Bench, text: Text, sizes: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """(streams, draft logits) of every position but the last, in chunks."""
    streams, logits = [], []
    for n in sizes:
        step = forward_of([(text, n)], bench.pool, bench.tp)
        streams.append(bench.model.streams(step))
        after = torch.tensor(text.tokens[text.done - n + 1 : text.done + 1])
        logits.append(bench.model.draft(streams[-1], replace(step, tokens=after)))
    return torch.cat(streams), torch.cat(logits)


@pytest.mark.parametrize("sizes", [[60], [25, 1, 1, 33]], ids=str)
def test_drafts_equal_a_forward_pass_of_their_own(
    model: DeepseekV4, checkpoint: Path, sizes: list[int]
) -> None:
    text = random_text(61)
    streams, logits = drafts(make_bench(model, draft=True), text, sizes)
    expected = Reference(checkpoint).logits(streams, text.tokens[1:])
    assert expected.std() > 0.3
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("length", [121, 123])
def test_drafted_greedy_text_is_the_plain_one(model: DeepseekV4, length: int) -> None:
    """Steps of two tokens, the second a draft: right, wrong or the layer's own. Past a border of 4 and of 128."""
    num = 14
    plain = random_text(200)
    del plain.tokens[length:]
    bench = make_bench(model, draft=True)
    logits = bench.run(plain, [length])
    for _ in range(num):
        plain.tokens.append(int(logits[-1].argmax()))
        logits = bench.run(plain, [1])

    text = random_text(200, slot=1, first_page=9)
    del text.tokens[length:]
    step = forward_of([(text, length)], bench.pool, bench.tp)
    streams = model.streams(step)
    text.tokens.append(int(model.logits(streams[-1:])[0].argmax()))
    taken, rejected = 0, 0
    while len(text.tokens) < length + num - 2:
        true_next = plain.tokens[len(text.tokens)]
        guesses = (true_next, (true_next + 1) % 512, own_draft(model, streams, step, text))
        text.tokens.append(guesses[len(text.tokens) % 3])
        step = forward_of([(text, 2)], bench.pool, bench.tp)
        streams = model.streams(step)
        first, second = model.logits(streams).argmax(-1).tolist()
        if first == text.tokens[-1]:
            taken += 1
            text.tokens.append(second)
            continue
        rejected += 1
        text.tokens[-1] = first
        text.done -= 1
        streams, step = streams[:1], None
    assert taken
    assert rejected
    assert text.tokens[: length + num - 2] == plain.tokens[: length + num - 2]


def own_draft(model: DeepseekV4, streams: torch.Tensor, step: object, text: Text) -> int:
    """What the MTP layer proposes after the last token; after a rejected draft, some token."""
    from splitserve.layers.forward import Forward

    if not isinstance(step, Forward):
        return 7
    after = torch.tensor(text.tokens[-len(streams) :])
    return int(model.draft(streams, replace(step, tokens=after))[-1].argmax())


def test_a_model_without_the_layer_says_so(checkpoint: Path) -> None:
    cfg = replace(read_config(locate(checkpoint)), num_mtp=0)
    with pytest.raises(ConfigError, match="no MTP layer"):
        DeepseekV4(cfg, SoloGroup(), "f32", draft=True)
