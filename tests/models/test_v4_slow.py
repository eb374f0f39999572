"""What takes too long for every change: T1, with the released models' head, window and index sizes; a long prompt."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from splitserve.models.make_checkpoint import T1, TINY, write_checkpoint
from tests.models.v4_oracle import PAGE, load_model, make_bench, random_text, transformers_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_t1_equals_transformers(tmp_path: Path) -> None:
    """Whole, in chunks that divide nothing, and decoding past the 384th token, with 64 of 100 entries read."""
    write_checkpoint(tmp_path, T1, shard_bytes=16 << 20)
    model, oracle = load_model(tmp_path), transformers_model(tmp_path)
    text = random_text(400, vocab=2048)
    with torch.no_grad():
        expected = oracle(torch.tensor([text.tokens]), use_cache=False).logits[0]
    assert expected.std() > 0.3
    for sizes in ([400], [101, 202, 73, *[1] * 14]):
        text = random_text(400, vocab=2048)
        logits = make_bench(model).run(text, sizes)
        torch.testing.assert_close(logits, expected[: sum(sizes)], atol=1e-4, rtol=0)


def test_t1_runs_in_bf16_with_packed_rows(tmp_path: Path) -> None:
    """Near the float32 logits, as far as random weights let discrete choices agree."""
    write_checkpoint(tmp_path, T1)
    exact = make_bench(load_model(tmp_path)).run(random_text(200, vocab=2048), [200])
    model = load_model(tmp_path, dtype="bf16")
    for kv in ("", "fp8"):
        logits = make_bench(model, dtype="bf16", kv=kv).run(random_text(200, vocab=2048), [150, *[1] * 50])
        assert logits.isfinite().all()
        assert (logits.argmax(-1) == exact.argmax(-1)).float().mean() > 0.6
        assert (logits - exact).abs().mean() < 0.3


def test_a_prompt_of_20000_tokens(tmp_path: Path) -> None:
    """Its last logits do not depend on how it was cut; 5,000 entries, 156 of 128 tokens, contexts far beyond top-k."""
    write_checkpoint(tmp_path, TINY)
    model = load_model(tmp_path)
    ends = []
    for size in (1024, 771):
        text = random_text(20_010)
        bench = make_bench(model, num_pages=20_010 // PAGE + 3)
        while text.done < 20_000:
            last = bench.step([(text, min(size, 20_000 - text.done))])
        ends.append(torch.cat((last[-1:], bench.run(text, [1] * 9))))
    torch.testing.assert_close(ends[0], ends[1], atol=1e-3, rtol=0)
