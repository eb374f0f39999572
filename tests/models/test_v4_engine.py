"""DeepSeek-V4 in the engine, without processes: prefixes found again, preemption, guesses. Tokens are the bare model's.

Rows and slots that nobody holds are filled with NaN between requests, so that a state that was not kept shows.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from splitserve.dist.group import SoloGroup
from splitserve.engine.constraint import Constraints
from splitserve.engine.limits import Limits
from splitserve.engine.request import Request
from splitserve.engine.runner import Runner
from splitserve.engine.scheduler import Scheduler
from splitserve.kv.cache import Cache
from splitserve.kv.pool import Pool
from splitserve.layers.forward import Forward
from splitserve.models import registry
from splitserve.models.deepseek_v4 import DeepseekV4
from splitserve.models.make_checkpoint import TINY, write_checkpoint
from splitserve.models.read import read_config
from splitserve.spec import lay_out
from splitserve.text import byte_tokenizer, tokenizer
from splitserve.text.grammar import Vocabulary
from splitserve.types import Grammar, GrammarKind, SamplingParams
from splitserve.weights.locate import locate
from tests.models.v4_oracle import PAGE

NUM = 5
SEEDED = {"temperature": 1.0, "top_p": 0.9, "seed": 11}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Steps of this size are not worth a second thread, and on a busy machine it is waited for."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DeepseekV4:
    path: Path = tmp_path_factory.mktemp("tiny")
    write_checkpoint(path, TINY)
    source = locate(path)
    model = DeepseekV4(read_config(source), SoloGroup(), "f32", draft=True)
    model.load(source)
    return model


class Knowing:
    """A drafter that runs the model's own layer, and then guesses what `truth` says, wrongly at every third place."""

    def __init__(self, model: DeepseekV4, truth: Sequence[int]) -> None:
        self._model, self._truth = model, truth
        self.streams, self.logits = model.streams, model.logits

    def draft(self, streams: torch.Tensor, fwd: Forward) -> torch.Tensor:
        logits = self._model.draft(streams, fwd)
        for row, at in zip(logits, fwd.positions[fwd.logit_rows].tolist(), strict=True):
            if at + 2 < len(self._truth):
                row[(self._truth[at + 2] + (at % 3 == 0)) % 512] = 1e9
        return logits


@dataclass
class Engine:
    """Scheduler, runner and memory of one engine; `drafter` guesses if given."""

    model: DeepseekV4
    num_pages: int = 40
    num_snapshots: int = 4
    step_tokens: int = 100
    prefix: bool = True
    drafter: Any = None
    scheduler: Scheduler = field(init=False)

    def __post_init__(self) -> None:
        specs = registry.states(self.model.cfg, dtype="f32", draft=self.drafter is not None)
        num_slots = 4
        self.pool = Pool(
            specs,
            layout=lay_out(specs, page_tokens=PAGE),
            num_pages=self.num_pages,
            num_slots=num_slots + self.num_snapshots,
            device="cpu",
            allocate=lambda nbytes: torch.empty(nbytes, dtype=torch.uint8),
        )
        cache = Cache(
            num_pages=self.num_pages,
            page_tokens=PAGE,
            num_slots=num_slots,
            num_snapshots=self.num_snapshots,
            prefix=self.prefix,
        )
        limits = Limits(max_len=self.num_pages * PAGE, max_seqs=4, step_tokens=self.step_tokens)
        self.scheduler = Scheduler(cache, limits)
        self.runner = Runner(
            self.model,
            self.pool,
            page_tokens=PAGE,
            tp=SoloGroup(),
            device=torch.device("cpu"),
            between_layers=lambda: None,
            constraints=Constraints(vocabulary),
            drafter=self.drafter,
        )

    def answers(self, prompts: Sequence[list[int]], num: int = NUM, **sampling: Any) -> list[list[int]]:
        """What all prompts, asked at once, are answered with."""
        cache, got = self.scheduler.cache, {str(i): [] for i in range(len(prompts))}
        self.pool.poison(cache.free_pages(), cache.free_slots())
        for i, prompt in enumerate(prompts):
            params = SamplingParams(**{"temperature": 0.0, "max_tokens": num, **sampling})
            self.scheduler.add(Request(str(i), list(prompt), len(prompt), params), 0.0)
        while step := self.scheduler.plan(0.0):
            self.scheduler.apply(self.runner.launch(step).result())
            events, ended, _, _ = self.scheduler.drain()
            for event in events:
                got[event.rid] += event.tokens
            assert not [r.error for r in ended if r.error]
            self.scheduler.check()
        return list(got.values())

    def answer(self, prompt: list[int], num: int = NUM, **sampling: Any) -> list[int]:
        return self.answers([prompt], num, **sampling)[0]


@cache
def vocabulary() -> Vocabulary:
    """The bytes as tokens, and ids without a text up to the model's 512."""
    with TemporaryDirectory() as directory:
        byte_tokenizer.write(Path(directory), num_tokens=512)
        return Vocabulary(tokenizer.load(Path(directory)), 512)


def text(length: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(512) for _ in range(length)]


def alone(model: DeepseekV4, prompt: list[int], num: int = NUM, **sampling: Any) -> list[int]:
    """The answer of an engine that has seen nothing else and computes prompts whole."""
    return Engine(model, prefix=False, num_snapshots=0, step_tokens=4096).answer(prompt, num, **sampling)


def test_cached_answers_are_uncached_ones(model: DeepseekV4) -> None:
    """The same prompt, one that forks inside a page, one that forks before it, and one behind an answer."""
    engine, first = Engine(model), text(300)
    answer = engine.answer(first)
    prompts = [first, first[:290] + text(30, 1), first[:200] + text(90, 2), first[:200] + text(9, 3)]
    prompts += [first + answer + text(120, 4), first[:256]]
    found = []
    for prompt in prompts:
        before = engine.scheduler.counters.cached_tokens
        assert engine.answer(prompt) == alone(model, prompt)
        found.append(engine.scheduler.counters.cached_tokens - before)
    assert found == [256, 256, 0, 128, 256, 128]


def test_answers_that_cross_borders_can_be_continued(model: DeepseekV4) -> None:
    engine, prompt = Engine(model), text(250)
    answer = engine.answer(prompt, 12)
    following = prompt + answer + text(5, 1)
    assert engine.answer(following) == alone(model, following)
    assert engine.scheduler.counters.cached_tokens == 256


@pytest.mark.parametrize(
    "drafting", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["plain", "mtp"]
)
def test_preempted_requests_go_on_as_if_nothing_had_been(model: DeepseekV4, drafting: bool) -> None:
    prompts = [text(125, seed) for seed in range(3)]
    engine = Engine(model, num_pages=5, drafter=model if drafting else None)
    assert engine.answers(prompts, 8) == [alone(model, p, 8) for p in prompts]
    assert engine.scheduler.counters.preemptions


def check_guesses(
    model: DeepseekV4, length: int, sampling: dict[str, Any], *, others: Sequence[int] = ()
) -> None:
    """Right and wrong guesses, over borders of 4 and of 128; and by the model's own layer, in a batch."""
    prompt, num = text(length), 14
    plain = alone(model, prompt, num, **sampling)
    engine = Engine(model, drafter=Knowing(model, prompt + plain))
    assert engine.answer(prompt, num, **sampling) == plain
    counters = engine.scheduler.counters
    assert 0 < counters.accepted_tokens < counters.drafted_tokens
    longer = prompt + plain + text(5, 1)
    assert engine.answer(longer, 4, **sampling) == alone(model, longer, 4, **sampling)
    assert counters.cached_tokens
    batch = [prompt, *(text(n, n) for n in others)]
    expected = [plain, *(alone(model, p, num, **sampling) for p in batch[1:])]
    assert Engine(model, drafter=model).answers(batch, num, **sampling) == expected


def test_guesses_change_no_token(model: DeepseekV4) -> None:
    check_guesses(model, 123, {})


def test_guesses_change_no_drawn_token(model: DeepseekV4) -> None:
    check_guesses(model, 250, {**SEEDED, "repetition_penalty": 1.3})


GRAMMARS = [
    Grammar(GrammarKind.REGEX, "([a-f]|[0-9]{2}){9,}"),
    Grammar(
        GrammarKind.JSON_SCHEMA,
        '{"type": "object", "properties": {"n": {"type": "integer"}, "s": {"type": "string"}}, "required": ["n", "s"]}',
    ),
    Grammar(GrammarKind.EBNF, 'start: "<" word+ ">"\nword: /[a-z]{1,3}/ (" " | "-")'),
]


def bounded(grammar: Grammar) -> dict[str, Any]:
    return {"grammar": grammar, "stop_token_ids": vocabulary().eos_ids}


def test_guesses_change_no_token_under_a_grammar(model: DeepseekV4) -> None:
    check_guesses(model, 123, bounded(GRAMMARS[0]))


def test_guesses_change_no_drawn_token_under_a_grammar(model: DeepseekV4) -> None:
    check_guesses(model, 250, {**SEEDED, **bounded(GRAMMARS[1]), "min_tokens": 5})


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [{}, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda g: g.kind.value)
@pytest.mark.parametrize("length", [119, 253])
def test_guesses_in_batches_change_no_token_under_a_grammar(
    model: DeepseekV4, length: int, grammar: Grammar, sampling: dict[str, Any]
) -> None:
    check_guesses(model, length, {**sampling, **bounded(grammar)}, others=(3, 130, 127))


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [{}, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("length", [1, 2, 119, 254, 383])
def test_guesses_in_batches_change_no_token(model: DeepseekV4, length: int, sampling: dict[str, Any]) -> None:
    check_guesses(model, length + 128, sampling, others=(3, 130, 127))


def check_history(model: DeepseekV4, data: st.DataObject, most: int) -> None:
    engine = Engine(model, step_tokens=data.draw(st.integers(1, 300)), num_snapshots=2)
    base = text(400)
    for i in range(data.draw(st.integers(2, most))):
        prompt = base[: data.draw(st.integers(1, 400))] + text(data.draw(st.integers(0, 9)), i + 1)
        assert engine.answer(prompt, 4) == alone(model, prompt, 4)


@settings(max_examples=2, deadline=None)
@given(data=st.data())
def test_any_lengths_and_chunks(model: DeepseekV4, data: st.DataObject) -> None:
    check_history(model, data, 3)


@pytest.mark.slow
@pytest.mark.timeout(600)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_many_lengths_and_chunks(model: DeepseekV4, data: st.DataObject) -> None:
    check_history(model, data, 5)
