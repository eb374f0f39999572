"""DeepSeek-V4's ops against numbers worked out apart from them, and against slow definitions."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from splitserve.models.config import Rope
from splitserve.models.rope import frequencies
from splitserve.ops.ref import v4 as ops
from splitserve.ops.ref.v4 import hyper, quant, rows


def near(actual: torch.Tensor, expected: list[float], tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(
        actual.flatten().double(), torch.tensor(expected).double(), atol=tolerance, rtol=0
    )


def mixes() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    i = torch.arange(24)
    return ((7 * i % 24) - 12)[None] / 6, ((5 * i % 24) - 12) / 24, torch.tensor([0.5, 0.75, 1.25])


class TestHyperConnections:
    def test_split_and_sinkhorn(self) -> None:
        pre, post, comb = hyper.hc_split(*mixes(), n=4, iters=20, eps=1e-6)
        near(pre, [0.182427, 0.329968, 0.520822, 0.705786])
        near(post, [0.678487, 0.716332, 1.244919, 0.390369])
        near(comb[0, 0], [0.0659427, 0.1085224, 0.7940001, 0.0315342], 1e-6)
        near(comb[0, 1], [0.2990015, 0.4920726, 0.0659430, 0.1429818], 1e-6)
        near(comb[0, 2], [0.2400310, 0.3950234, 0.0529375, 0.3120069], 1e-6)
        near(comb[0, 3], [0.3950238, 0.0043806, 0.0871184, 0.5134761], 1e-6)
        assert (comb.sum(1) - 1).abs().max() < 1e-5, "the last step divides columns"

    def test_post_takes_old_streams_by_the_first_index(self) -> None:
        _, post, comb = hyper.hc_split(*mixes(), n=4, iters=20, eps=1e-6)
        streams = torch.tensor([[[1.0], [2.0], [3.0], [4.0]]])
        y = torch.tensor([[10.0]])
        near(ops.hc_post(y, streams, post, comb), [9.749007, 9.458580, 13.882360, 7.211117])
        wrong = ops.hc_post(y, streams, post, comb.transpose(1, 2))
        assert (wrong.flatten() - torch.tensor([9.749007, 9.458580, 13.882360, 7.211117])).abs().max() > 0.1

    def test_norm_may_follow_the_product(self) -> None:
        torch.manual_seed(0)
        streams, fn = torch.randn(5, 4, 8), torch.randn(24, 32)
        flat = streams.flatten(1)
        normed = flat / (flat.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        torch.testing.assert_close(hyper.hc_mixes(streams, fn, 1e-6), normed @ fn.T)

    def test_bf16_streams_are_mixed_in_float32(self) -> None:
        torch.manual_seed(1)
        streams = torch.randn(3, 4, 8).bfloat16()
        x, post, comb = ops.hc_pre(
            streams, torch.randn(24, 32), torch.randn(24), torch.ones(3), iters=20, eps=1e-6, norm_eps=1e-6
        )
        assert (x.dtype, post.dtype, comb.dtype) == (torch.bfloat16, torch.float32, torch.float32)
        assert ops.hc_post(x, streams, post, comb).dtype == torch.bfloat16


class TestRope:
    YARN = Rope("yarn", 160000.0, factor=16.0, original_len=65536, attention_factor=1.0)
    PAIRS = (0, 15, 16, 20, 25, 31)

    def table(self, position: int) -> ops.Table:
        found = frequencies(self.YARN, 64, 1 << 20)
        assert found.scale == 1.0, "cos and sin keep modulus one"
        return ops.rope_table(torch.tensor([position]), torch.tensor(found.inverse))

    def test_yarn(self) -> None:
        pick = list(self.PAIRS)
        near(self.table(1)[1][0, pick], [0.841471, 0.003636, 0.002266, 0.000297, 5e-6, 1e-6], 1e-6)
        near(self.table(1000)[0][0, pick], [0.562379, -0.880469, -0.640254, 0.956225, 0.999986, 1.0], 2e-5)
        near(
            self.table(70000)[0][0, pick],
            [0.567354, -0.999825, 0.056649, -0.359836, 0.930118, 0.99921],
            2e-3,  # float32 angles at 70,000 tokens, as every implementation has them
        )

    def test_turns_trailing_neighbours_and_back(self) -> None:
        torch.manual_seed(0)
        x = torch.randn(3, 2, 10)
        table = ops.rope_table(torch.tensor([0, 5, 9]), torch.tensor([1.0, 0.1]))
        turned = ops.rotate_tail(x, table)
        assert torch.equal(turned[..., :6], x[..., :6])
        assert torch.equal(turned[0], x[0]), "position 0 turns nothing"
        as_complex = torch.view_as_complex(x[1, 0, 6:].view(2, 2)) * torch.polar(
            torch.ones(2), torch.tensor([5.0, 0.5])
        )
        torch.testing.assert_close(turned[1, 0, 6:], torch.view_as_real(as_complex).flatten())
        torch.testing.assert_close(ops.rotate_tail(turned, table, inverse=True), x)


class TestRouting:
    LOGITS = torch.tensor([[0.3, -1.2, 2.0, 0.1, -0.4, 1.1, 0.9, -2.0]])

    def test_bias_selects_and_does_not_weigh(self) -> None:
        bias = torch.tensor([0, 0.5, -0.9, 0.1, 0, -0.2, 0, 1.1])
        weights, experts = ops.route(self.LOGITS, bias, count=3, scale=1.5)
        found = dict(zip(experts[0].tolist(), weights[0].tolist(), strict=True))
        assert found.keys() == {7, 6, 1}
        for expert, weight in ((7, 0.269432), (6, 0.842525), (1, 0.388044)):
            assert found[expert] == pytest.approx(weight, abs=1e-5)

    def test_token_ids_select_and_the_gate_weighs(self) -> None:
        table = torch.tensor([[0, 1, 2], [7, 6, 1]], dtype=torch.int32)
        weights, experts = ops.route_by_token(self.LOGITS, table, torch.tensor([1]), scale=1.5)
        assert experts.tolist() == [[7, 6, 1]]
        near(weights, [0.269432, 0.842525, 0.388044])

    def test_gate_is_clamped_above_only_and_up_on_both_sides(self) -> None:
        gate_up = torch.tensor([[12.0, -12.0, 3.0, -15.0, 4.0, 2.0]])
        near(ops.clamped_swiglu(gate_up, 10.0), [-99.99546, -0.00029492, 5.715445])

    def test_experts_are_mixed_as_if_one_by_one(self) -> None:
        torch.manual_seed(0)
        x, gate_up, down = torch.randn(6, 8), torch.randn(5, 8, 8), torch.randn(5, 8, 4)
        weights, experts = torch.rand(6, 2), torch.stack([torch.randperm(5)[:2] for _ in range(6)])
        expected = torch.zeros(6, 8)
        for t in range(6):
            for w, e in zip(weights[t], experts[t], strict=True):
                expected[t] += w * (ops.clamped_swiglu(x[t] @ gate_up[e].T, 10.0) @ down[e].T)
        parts = [
            ops.mix_experts(x, gate_up[a:b], down[a:b], weights, experts, local=range(a, b), limit=10.0)
            for a, b in ((0, 2), (2, 5))
        ]
        torch.testing.assert_close(parts[0] + parts[1], expected)


class TestAttention:
    def test_sink_takes_its_share_and_gives_nothing(self) -> None:
        # one head; keys along the axes of q so that the scaled logits are 0.7 and -0.2, values told apart
        latents = torch.tensor([[0.7, 1.0, 0.0], [-0.2, 0.0, 1.0]])[None]
        near_rows = ops.Rows(latents, torch.tensor([[0, 1]]))
        q = torch.tensor([[[1.0, 0.0, 0.0]]])
        out = ops.attend(q, near_rows, None, torch.tensor([0.4]), scale=1.0, rope_dim=2)
        near(out[0, 0, 1:], [0.465682, 0.189332])

    def test_rows_that_are_none_are_never_read(self) -> None:
        torch.manual_seed(0)
        view = torch.randn(2, 4, 8)
        q, sink = torch.randn(3, 2, 8), torch.randn(2)
        index = torch.tensor([[0, 5, -1], [7, -1, -1], [2, 3, 4]])
        far = ops.Rows(torch.full((1, 2, 8), math.nan), torch.full((3, 2), -1))
        out = ops.attend(q, ops.Rows(view, index), far, sink, scale=0.3, rope_dim=2)
        view.view(-1, 8)[[1, 6]] = math.nan
        again = ops.attend(q, ops.Rows(view, index), None, sink, scale=0.3, rope_dim=2)
        torch.testing.assert_close(out, again)
        alone = ops.attend(
            q[1:2], ops.Rows(view.view(8, 1, 8), torch.tensor([[7]])), None, sink, scale=0.3, rope_dim=2
        )
        torch.testing.assert_close(out[1:2], alone)

    def test_near_and_far_share_one_softmax(self) -> None:
        torch.manual_seed(0)
        view, q, sink = torch.randn(1, 6, 8), torch.randn(2, 3, 8), torch.randn(3)
        one = ops.Rows(view, torch.tensor([[0, 1, 2, 3], [5, 4, 3, 0]]))
        both = ops.Rows(view, one.index[:, :2]), ops.Rows(view, one.index[:, 2:])
        kw = {"scale": 0.3, "rope_dim": 2}
        found, out = ops.attend(q, *both, sink, **kw), torch.empty_like(q)
        torch.testing.assert_close(found, ops.attend(q, one, None, sink, **kw))
        assert ops.attend(q, *both, sink, **kw, out=out) is out
        assert torch.equal(out, found)


class TestCompression:
    def test_pooling_of_ratio_4(self) -> None:
        half_a, half_b = torch.arange(1.0, 9), torch.arange(1.0, 9) * 10
        gate_a = torch.tensor([0.1, 0.3, 0, -0.2, 0.5, 0.2, -0.4, 0.1])
        gate_b = torch.tensor([0.2, -0.1, 0.4, 0.1, 0, 0.3, 0.6, -0.5])
        ape_a, ape_b = torch.tensor([0.01, 0.02, 0.03, 0.04]), torch.tensor([0.1, 0.2, 0.3, 0.4])
        fresh = torch.stack((half_a, gate_a + ape_a.repeat(2), half_b, gate_b + ape_b.repeat(2)), dim=-1)
        windows = plan(q_lens=[8], kv_lens=[8], ratio=4)
        state = torch.full((1, 8, 2), math.nan)
        near(ops.pool_windows(fresh, state[:, :4], state, windows), [26.475414, 38.984024])

    def test_visibility(self) -> None:
        for ratio, seen in (
            (4, {0: 0, 2: 0, 3: 1, 6: 1, 7: 2, 8: 2}),
            (128, {126: 0, 127: 1, 128: 1, 255: 2}),
        ):
            for t, count in seen.items():
                assert (t + 1) // ratio == count
                assert len(plan(q_lens=[1], kv_lens=[t + 1], ratio=ratio)) == ((t + 1) % ratio == 0)

    @settings(max_examples=60, deadline=None)
    @given(
        ratio=st.sampled_from([4, 128]),
        lengths=st.lists(st.lists(st.integers(1, 150), min_size=1, max_size=4), min_size=1, max_size=3),
    )
    def test_chunks_pool_the_windows_of_the_whole(self, ratio: int, lengths: list[list[int]]) -> None:
        """Any chunking of several requests side by side gives the entries of each whole request, in their places."""
        torch.manual_seed(0)
        width, halves = 3, 2 if ratio == 4 else 1
        texts = [torch.randn(sum(chunks), halves * 2 * width) for chunks in lengths]
        pending = torch.full((len(texts), ratio, 2 * width), math.nan)
        carry = torch.full((len(texts), 8, 2 * width), math.nan) if halves == 2 else None
        pages = torch.arange(20 * len(texts)).view(len(texts), 20)
        store = torch.full((pages.numel(), 128 // ratio, width), math.nan)
        done = [0] * len(texts)
        for i in range(max(map(len, lengths))):
            live = [s for s in range(len(texts)) if i < len(lengths[s])]
            q_lens = [lengths[s][i] for s in live]
            fresh = torch.cat([texts[s][done[s] : done[s] + n] for s, n in zip(live, q_lens, strict=True)])
            for s, n in zip(live, q_lens, strict=True):
                done[s] += n
            kv_lens, slots = [done[s] for s in live], torch.tensor(live)
            windows = plan(q_lens, kv_lens, ratio, slots, pages[slots])
            pooled = ops.pool_windows(fresh, pending, carry, windows)
            ops.write_rows(store, pooled, windows.page, windows.row)
            for view, rows_ in ((pending, fresh[:, -2 * width :]), (carry, fresh[:, : 2 * width])):
                if view is not None:
                    save = ops.plan_saves(q_lens, kv_lens, rows=view.shape[1], slots=slots)
                    ops.write_rows(view, rows_[save.token], save.slot, save.row)
        for s, text in enumerate(texts):
            found = store[pages[s]].flatten(0, 1)[: len(text) // ratio]
            torch.testing.assert_close(found, naive_pool(text, ratio, width), equal_nan=False)


def plan(
    q_lens: list[int],
    kv_lens: list[int],
    ratio: int,
    slots: torch.Tensor | None = None,
    pages: torch.Tensor | None = None,
) -> ops.Windows:
    return ops.plan_windows(
        q_lens,
        kv_lens,
        ratio=ratio,
        slots=torch.arange(len(q_lens)) if slots is None else slots,
        pages=torch.arange(20)[None] if pages is None else pages,
        page_tokens=128,
    )


def naive_pool(rows_: torch.Tensor, ratio: int, width: int) -> torch.Tensor:
    """Entries of one request, token by token and channel by channel as the definition has it."""
    out = []
    for w in range(len(rows_) // ratio):
        members = [rows_[w * ratio + j, -2 * width :] for j in range(ratio)]
        if ratio == 4 and w:
            members += [rows_[(w - 1) * ratio + j, : 2 * width] for j in range(ratio)]
        kv = torch.stack([m[:width] for m in members])
        weight = torch.stack([m[width:] for m in members]).exp()
        out.append((kv * weight).sum(0) / weight.sum(0))
    return torch.stack(out) if out else torch.empty(0, width)


class TestIndexer:
    def test_scores_are_weighted_relus_of_visible_keys(self) -> None:
        torch.manual_seed(0)
        q, weights, view = torch.randn(5, 3, 4), torch.randn(5, 3), torch.randn(6, 2, 4)
        pages = torch.tensor([[4, 1, 3], [0, 2, 5]])
        visible = torch.tensor([3, 4, 0, 5, 6])
        scores = ops.index_scores(q, weights, view, pages, visible, q_lens=[2, 3])
        for t, seq in enumerate([0, 0, 1, 1, 1]):
            keys = view[pages[seq]].flatten(0, 1)
            for i in range(6):
                expected = sum(weights[t, h] * max(float(q[t, h] @ keys[i]), 0.0) for h in range(3))
                assert scores[t, i] == (
                    pytest.approx(float(expected), abs=1e-5) if i < visible[t] else -math.inf
                )

    def test_chooses_the_best_and_no_more_than_are_visible(self) -> None:
        scores = torch.tensor([[3.0, -1, 2, 5], [1, -math.inf, -math.inf, -math.inf], [-math.inf] * 4])
        chosen = ops.choose_entries(scores, 2)
        assert [sorted(row) for row in chosen.tolist()] == [[0, 3], [-1, 0], [-1, -1]]
        assert ops.choose_entries(scores, 9).shape == (3, 4)


class TestFormats:
    def test_activation_scale(self) -> None:
        bits = quant.power_of_two_scale(torch.tensor([447.0, 448.0, 449.0, 224.0]), quant.E4M3_MAX)
        assert ops.ue8m0_to_float(bits).tolist() == [1.0, 1.0, 2.0, 0.5]
        codes = torch.tensor([0.5, -3, 100, 447]).to(torch.float8_e4m3fn)
        assert codes.float().tolist() == [0.5, -3, 96, 448]

    def test_mxfp4(self) -> None:
        codes = torch.tensor([[0x21, 0x7F, 0xB4, 0x90] + [0] * 12], dtype=torch.uint8)
        values = ops.dequantise_mxfp4(codes, torch.tensor([[126]], dtype=torch.uint8), torch.float32)
        assert values[0, :8].tolist() == [0.25, 0.5, -3, 3, 1, -0.75, 0, -0.25]

    def test_every_e4m3_byte(self) -> None:
        codes = torch.tensor([b for b in range(256) if b & 0x7F != 0x7F], dtype=torch.uint8)
        as_float = codes.view(torch.float8_e4m3fn)[None]
        scales = torch.tensor([[130]], dtype=torch.uint8)
        values = ops.dequantise_tiles(as_float, scales, (128, 256), torch.float32)
        assert torch.equal(values, as_float.float() * 8)

    @pytest.mark.parametrize("shape", [(256, 256), (200, 130), (64, 384)])
    @pytest.mark.parametrize("tile", [(128, 128), (64, 128), (32, 64)])
    def test_tiles_are_scaled_one_by_one(self, shape: tuple[int, int], tile: tuple[int, int]) -> None:
        torch.manual_seed(0)
        codes = torch.randn(shape).to(torch.float8_e4m3fn)
        grid = tuple(-(-n // t) for n, t in zip(shape, tile, strict=True))
        scales = torch.rand(grid)
        values = ops.dequantise_tiles(codes, scales, tile, torch.float32)
        for _ in range(50):
            i, j = int(torch.randint(shape[0], ())), int(torch.randint(shape[1], ()))
            assert values[i, j] == codes.float()[i, j] * scales[i // tile[0], j // tile[1]]

    def test_quantising_is_to_the_nearest(self) -> None:
        torch.manual_seed(0)
        weight = torch.randn(160, 192)
        codes, scales = ops.quantise_tiles(weight)
        back = ops.dequantise_tiles(codes, scales, (128, 128), torch.float32)
        assert ((back - weight).abs() <= weight.abs() / 16 + 1e-4).all()
        codes, scales = ops.quantise_mxfp4(weight)
        back = ops.dequantise_mxfp4(codes, scales, torch.float32)
        step = ops.ue8m0_to_float(scales).repeat_interleave(32, 1)
        assert ((back - weight).abs() <= step * torch.where(weight.abs() > 4 * step, 1.0, 0.5)).all()
        again = ops.dequantise_mxfp4(*ops.quantise_mxfp4(back), torch.float32)
        assert torch.equal(again, back), "exact values stay what they are"


class TestRows:
    def test_packed_latent_of_the_released_sizes(self) -> None:
        torch.manual_seed(0)
        x = torch.randn(3, 512) * torch.rand(3, 1) * 100
        packed = rows.pack_latents(x, 64)
        assert packed.shape == (3, 584)
        back = rows.unpack_latents(packed, 64, 512)
        assert torch.equal(back[:, 448:], x[:, 448:].bfloat16().float())
        assert ((back - x)[:, :448].abs() <= x[:, :448].abs() / 16 + 1e-2).all()
        again = rows.unpack_latents(rows.pack_latents(back, 64), 64, 512)
        assert torch.equal(again, back), "what was packed once is exact"

    def test_packed_index_key(self) -> None:
        torch.manual_seed(0)
        x = torch.randn(4, 128)
        packed = rows.pack_keys(x)
        assert packed.shape == (4, 132)
        assert ((rows.unpack_keys(packed) - x).abs() <= x.abs() / 16 + 1e-2).all()

    def test_a_none_reads_as_zeros_even_over_nan(self) -> None:
        view = torch.full((2, 2, 3), math.nan)
        assert torch.equal(ops.take_rows(view, torch.tensor([[-1]])), torch.zeros(1, 1, 3))
