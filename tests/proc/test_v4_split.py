"""DeepSeek-V4 through the split with real processes and NIXL: tokens equal the bare model's, nothing is recomputed."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from splitserve.models.deepseek_v4 import DeepseekV4
from splitserve.models.make_checkpoint import TINY, write_checkpoint
from tests.models.v4_oracle import Text, load_model, make_bench
from tests.proc.real import Deployment
from tests.tiny_chat import write_chat_checkpoint

pytestmark = pytest.mark.timeout(400)

LENGTHS = [1, 63, 127, 129, 257, 383]
NUM_TOKENS = 6


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("v4")
    write_checkpoint(path / "model", TINY)
    write_chat_checkpoint(path / "chat")  # for its tokenizer: random weights have no words
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(path / "chat" / name, path / "model" / name)
    return path / "model"


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> DeepseekV4:
    return load_model(checkpoint)


@contextmanager
def deployed(checkpoint: Path, **settings: Any) -> Iterator[Deployment]:
    deployment = Deployment(checkpoint, name="v4", deadline_s=30.0, **settings)
    text = deployment.file.read_text()
    for name, old, new in (("page_tokens", 16, 128), ("num_pages", 256, 40), ("step_tokens", 32, 100)):
        assert f"{name} = {old}" in text
        text = text.replace(f"{name} = {old}", f"{name} = {new}")
    deployment.file.write_text(text)
    deployment.up()
    try:
        yield deployment
    finally:
        deployment.close()


@pytest.fixture(scope="module")
def pair(checkpoint: Path) -> Iterator[Deployment]:
    with deployed(checkpoint) as deployment:
        yield deployment


def prompt(length: int) -> list[int]:
    draw = random.Random(length)
    return [draw.randrange(6, 262) for _ in range(length)]


def greedy(model: DeepseekV4, length: int) -> list[int]:
    """What the bare model says after a prompt, token by token, in one process."""
    text = Text(prompt(length), pages=list(range(1, 6)), slot=0)
    bench = make_bench(model)
    logits = bench.run(text, [length])
    answer = []
    for _ in range(NUM_TOKENS):
        answer.append(int(logits[-1].argmax()))
        text.tokens.append(answer[-1])
        logits = bench.run(text, [1])
    return answer


def test_tokens_through_the_split_are_the_models(pair: Deployment, model: DeepseekV4) -> None:
    """All lengths at once, so that prefill chunks and decode batches mix them."""
    with ThreadPoolExecutor(len(LENGTHS)) as threads:
        answers = list(threads.map(lambda n: pair.generate(prompt(n), NUM_TOKENS), LENGTHS))
    for length, (status, answer) in zip(LENGTHS, answers, strict=True):
        assert status == 200, answer
        assert answer["output_ids"] == greedy(model, length), f"prompt of {length} tokens"
    pair.check()


@pytest.mark.slow
def test_verify_proves_the_split(pair: Deployment) -> None:
    done = pair.run("verify", str(pair.file), "--json", timeout_s=280)
    assert done.stdout, done.stderr
    proof = json.loads(done.stdout)
    assert proof["cases"]
    for case in proof["cases"]:
        assert case["findings"] == [], case["name"]
        crossing = case["crossing"]
        assert crossing["recomputations"] == 0
        assert crossing["num_bytes"] == crossing["expected_bytes"] > 0
        assert crossing["digest_checked"]


@pytest.mark.slow
def test_verify_catches_every_planted_fault(pair: Deployment) -> None:
    done = pair.run("verify", str(pair.file), "--plant", "all", "--json", timeout_s=380)
    assert done.stdout, done.stderr
    planted = json.loads(done.stdout)["planted"]
    assert planted
    missed = {p["fault"] for p in planted if not p["caught"]}
    assert missed <= {"swap_heads"}, "the latent is one piece: there are no heads to swap"


@pytest.mark.slow
@pytest.mark.parametrize("tp", [(2, 1), (1, 2)], ids=["2-1", "1-2"])
def test_sides_of_unequal_size(checkpoint: Path, model: DeepseekV4, tp: tuple[int, int]) -> None:
    """The latent is one piece: it goes whole to every rank of the destination."""
    with deployed(checkpoint, tp=tp) as deployment:
        for length in (3, 129, 254):
            status, answer = deployment.generate(prompt(length), NUM_TOKENS)
            assert status == 200, answer
            assert answer["output_ids"] == greedy(model, length), f"prompt of {length} tokens"
        deployment.check()
