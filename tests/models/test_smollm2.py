"""The demo model itself, from its GGUF: logits on real text against transformers, and the same text in chunks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from splitserve.dist.group import SoloGroup
from splitserve.models.read import read_config
from splitserve.models.registry import build
from splitserve.text.tokenizer import load as load_tokenizer
from splitserve.weights.locate import Source, locate
from tests.tiny import Text, make_forward, make_pool

PASSAGE = """The harbour lay quiet at 6:45 on the morning of 12 March 1911. Two fishing boats, the Aurora and the
Little Ann, were already back; a third was still out beyond the mole. "Any luck?" called the harbour master. Nobody
answered, for the wind had turned, and it carried his question off towards the hills. He wrote 3 boats, 2 landed into
his book, drew a line beneath it, and went to see about breakfast."""
PAGE = 64


@pytest.fixture(scope="module")
def source() -> Source:
    return locate("smollm2-135m")


@pytest.fixture(scope="module")
def model(source: Source) -> Any:
    made = build(read_config(source), SoloGroup(), dtype="f32")
    done: list[float] = []
    made.load(source, done.append)
    assert done == sorted(done)
    assert done[-1] == 1.0
    assert len(done) > 100
    return made


@pytest.fixture(scope="module")
def tokens(source: Source) -> list[int]:
    return load_tokenizer(source.path).encode(PASSAGE)


def run(model: Any, tokens: list[int], sizes: list[int]) -> torch.Tensor:
    pool = make_pool(model.cfg, num_pages=4, page_tokens=PAGE)
    seq = Text(tokens, [2, 0, 3])
    return torch.cat(
        [
            model.forward(make_forward([(seq, n)], states=pool, tp=SoloGroup(), page_tokens=PAGE))
            for n in sizes
        ]
    )


def test_chunks_equal_the_whole(model: Any, tokens: list[int]) -> None:
    """Bit for bit: a prefill engine that chunks and a unified one that does not give the same tokens."""
    whole = run(model, tokens, [len(tokens)])
    assert torch.isfinite(whole).all()
    rest = len(tokens) - 71
    assert torch.equal(run(model, tokens, [64, 1, 1, 1, 4, rest]), whole)


def test_it_knows_a_capital(model: Any, source: Source) -> None:
    tokenizer = load_tokenizer(source.path)
    logits = run(model, tokens := tokenizer.encode("The capital of France is the city of"), [len(tokens)])
    assert tokenizer.decode([int(logits[-1].argmax())]) == " Paris"


@pytest.mark.slow  # 10 to 40 s: transformers reads GGUF in Python
@pytest.mark.timeout(300)
def test_logits_equal_transformers(model: Any, source: Source, tokens: list[int]) -> None:
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(
        source.path.parent, gguf_file=source.path.name, dtype=torch.float32, local_files_only=True
    ).eval()
    with torch.no_grad():
        expected = reference(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(run(model, tokens, [len(tokens)]), expected, atol=1e-4, rtol=0)
