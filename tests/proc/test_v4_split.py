"""DeepSeek-V4 through the split with real processes and NIXL: tokens equal the bare model's, nothing is recomputed."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from splitserve.models.deepseek_v4 import DeepseekV4
from splitserve.models.make_checkpoint import TINY, write_checkpoint
from tests.models.v4_oracle import PAGE, Text, load_model, make_bench
from tests.proc.real import Deployment
from tests.tiny_chat import write_chat_checkpoint

pytestmark = pytest.mark.timeout(400)

LENGTHS = [3, 63, 128, 257, 383]
"""0, 1, 3, 63 and 127 beyond a multiple of 128; of 4 therefore 0, 1 and 3."""
NUM_TOKENS = 6


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("v4"), TINY)


def write_model(path: Path, config: dict[str, Any]) -> Path:
    write_checkpoint(path / "model", config)
    write_chat_checkpoint(path / "chat")  # for its tokenizer: random weights have no words
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(path / "chat" / name, path / "model" / name)
    return path / "model"


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Iterator[DeepseekV4]:
    """On one thread: the engines' processes want the cores too."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield load_model(checkpoint)
    torch.set_num_threads(before)


@contextmanager
def deployed(
    checkpoint: Path,
    *,
    num_pages: int = 40,
    step_tokens: int = 100,
    deadline_s: float = 30.0,
    engine: str = "",
    **settings: Any,
) -> Iterator[Deployment]:
    """A pair up; `engine` is more lines for [engine]."""
    deployment = Deployment(
        checkpoint,
        name="v4",
        deadline_s=deadline_s,
        num_pages=num_pages,
        step_tokens=step_tokens,
        **settings,
    )
    text = deployment.file.read_text()
    for old, new in (("page_tokens = 16", "page_tokens = 128"), ("[prefill]", f"{engine}\n[prefill]")):
        assert old in text
        text = text.replace(old, new, 1)
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


def greedy(model: DeepseekV4, length: int, num: int = NUM_TOKENS) -> list[int]:
    """What the bare model says after a prompt, token by token, in one process."""
    num_pages = -(-(length + num) // PAGE)
    text = Text(prompt(length), pages=list(range(1, num_pages + 1)), slot=0)
    bench = make_bench(model, num_pages=num_pages + 1)
    logits = bench.run(text, [*[500] * (length // 500), length % 500][: -(-length // 500)])
    answer = []
    for _ in range(num):
        answer.append(int(logits[-1].argmax()))
        text.tokens.append(answer[-1])
        logits = bench.run(text, [1])
    return answer


def compare(
    pair: Deployment, model: DeepseekV4, lengths: Sequence[int] = LENGTHS, num: int = NUM_TOKENS
) -> None:
    """All lengths at once, so that prefill chunks and decode batches mix them."""
    with ThreadPoolExecutor(len(lengths)) as threads:
        answers = list(threads.map(lambda n: pair.generate(prompt(n), num, timeout_s=300.0), lengths))
    for length, (status, answer) in zip(lengths, answers, strict=True):
        assert status == 200, answer
        assert answer["output_ids"] == greedy(model, length, num), f"prompt of {length} tokens"
    pair.check()


def test_tokens_through_the_split_are_the_models(pair: Deployment, model: DeepseekV4) -> None:
    compare(pair, model)


def test_a_prompt_that_comes_again_is_continued_on_prefill(pair: Deployment, model: DeepseekV4) -> None:
    """From the state that was kept at its last page border, while decode takes what it has not."""
    for cached in (0, 256):
        status, answer = pair.generate(prompt(300), NUM_TOKENS)
        assert status == 200, answer
        assert answer["output_ids"] == greedy(model, 300)
        assert answer["meta_info"]["cached_tokens"] == cached
    pair.check()


@pytest.mark.slow
def test_answers_past_the_next_two_borders(pair: Deployment, model: DeepseekV4) -> None:
    compare(pair, model, [1, 2, 127, 128, 129, 131, 191, 255], 260)


@pytest.mark.slow
def test_a_prompt_of_20000_tokens(checkpoint: Path, model: DeepseekV4) -> None:
    with deployed(checkpoint, num_pages=170, step_tokens=512, deadline_s=300.0) as deployment:
        compare(deployment, model, [20_000, 3])


@pytest.mark.slow
def test_guesses_through_the_split(checkpoint: Path, model: DeepseekV4) -> None:
    """The MTP layer's window moves with the rest, and the first guess with the first token; no token changes."""
    with deployed(checkpoint, engine='speculative = "mtp"') as deployment:
        compare(deployment, model, num=14)
        counters = deployment.call("decode-0", "/debug/stats")[1]["counters"]
        assert counters["drafted_tokens"] > len(LENGTHS)
        prove(deployment)


@pytest.mark.slow
def test_verify_proves_the_split(pair: Deployment) -> None:
    prove(pair)


def prove(pair: Deployment) -> None:
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
    assert [p["fault"] for p in planted if not p["caught"]] == []


@pytest.mark.slow
@pytest.mark.parametrize("tp", [(2, 1), (1, 2), (2, 4), (4, 2)], ids=lambda tp: "{}-{}".format(*tp))
def test_sides_of_unequal_size(tmp_path: Path, tp: tuple[int, int]) -> None:
    """The latent is one piece: it goes whole to every rank of the destination. Four ranks need four output groups.

    All ranks guess alike, and copy the same slots: the second time prompts are continued from their borders.
    """
    checkpoint = write_model(tmp_path, TINY | {"o_groups": 4})
    with deployed(checkpoint, tp=tp, deadline_s=120.0, engine='speculative = "mtp"') as deployment:
        for _ in range(2):
            compare(deployment, load_model(checkpoint), [3, 129, 254])
        counters = deployment.call("prefill-0", "/debug/stats")[1]["counters"]
        assert counters["cached_tokens"] == 2 * 128
