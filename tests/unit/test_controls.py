"""Any combination of controls, through a scheduler and a runner: an answer that moves between engines is the same.

The model is a table: its logits depend on the last token and the position, so whole answers can be compared exactly.
What a rank remembers (matchers, last tokens) is not on the engine that an answer moves to.
"""

from __future__ import annotations

import re
from types import SimpleNamespace
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
from splitserve.layers.forward import Forward
from splitserve.text import grammar, tokenizer
from splitserve.text.grammar import Vocabulary
from splitserve.types import FinishReason, Grammar, GrammarKind, SamplingParams, TokenLogprobs
from tests.fake_engine import END, VOCAB, save_tokenizer

PROMPT = [5, 6, 7, 8, 9, 10, 11]
REGEX = r"[a-c]{2,6}(x|yy)[0-9]*"


class Table:
    """Logits by last token and position."""

    def __init__(self) -> None:
        rows = torch.Generator().manual_seed(1)
        self._by_token = torch.randn(VOCAB, VOCAB, generator=rows) * 3
        self._by_position = torch.randn(64, VOCAB, generator=rows)

    def forward(self, fwd: Forward) -> torch.Tensor:
        at = fwd.logit_rows
        return self._by_token[fwd.tokens[at]] + self._by_position[fwd.positions[at] % 64]


TABLE = Table()


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    return Vocabulary(tokenizer.load(save_tokenizer(tmp_path_factory.mktemp("words"))), VOCAB)


class Engine:
    """A scheduler and a runner; `depth` steps are launched before the first is applied."""

    def __init__(self, vocabulary: Vocabulary, *, step_tokens: int, depth: int) -> None:
        cache = Cache(num_pages=64, page_tokens=4)
        self._scheduler = Scheduler(cache, Limits(max_len=100, max_seqs=8, step_tokens=step_tokens))
        self._depth = depth
        self._runner = Runner(
            TABLE,
            SimpleNamespace(),
            page_tokens=4,
            tp=SoloGroup(),
            device=torch.device("cpu"),
            between_layers=lambda: None,
            constraints=Constraints(lambda: vocabulary),
        )

    def go_on(
        self, answers: dict[str, Answer], params: dict[str, SamplingParams], *, until: int = 10**6
    ) -> None:
        """Extend unfinished answers until they end or have `until` tokens."""
        for rid, answer in answers.items():
            if answer.finish is None and len(answer.tokens) < until:
                tokens = [*PROMPT, *answer.tokens]
                self._scheduler.add(Request(rid, tokens, len(PROMPT), params[rid]), 0.0)
        flying = []
        for now in range(1000):
            step = self._scheduler.plan(float(now))
            if step is not None:
                flying.append(self._runner.launch(step))
            if not flying:
                return
            if step is None or len(flying) >= self._depth:
                self._scheduler.apply(flying.pop(0).result())
            for event in self._scheduler.drain()[0]:
                answers[event.rid].take(event, until)
                if len(answers[event.rid].tokens) >= until:
                    self._scheduler.abort(event.rid)
            self._scheduler.check()
        raise AssertionError("no end")


class Answer:
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.finish: FinishReason | None = None

    def take(self, event: Any, until: int) -> None:
        if event.finish is FinishReason.ABORT or len(self.tokens) >= until:
            return
        self.tokens += event.tokens
        self.logprobs += event.logprobs
        self.finish = event.finish

    @property
    def text(self) -> str:
        return bytes(t for t in self.tokens if t < 256).decode()


grammars = st.none() | st.sampled_from(
    [
        Grammar(GrammarKind.REGEX, REGEX),
        grammar.from_json_schema({"type": "array", "items": {"enum": ["a", 1]}, "maxItems": 3}, "x"),
        grammar.from_choices(["left", "right"]),
    ]
)
controls = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 5, 300]),
    top_p=st.sampled_from([0.3, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.2]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.integers(-100, 100).map(float), max_size=3),
    seed=st.integers(0, 2**64 - 1),
    choice=st.integers(0, 3),
    max_tokens=st.integers(1, 24),
    min_tokens=st.integers(0, 6),
    stop_token_ids=st.sampled_from([(END,), (END, ord("x")), (END, *range(60, 120))]),
    ignore_eos=st.booleans(),
    logprobs=st.none() | st.integers(0, 3),
    grammar=grammars,
)
penalties = st.fixed_dictionaries(
    {
        "repetition_penalty": st.sampled_from([1.0, 1.5]),
        "presence_penalty": st.sampled_from([0.0, 2.0]),
        "frequency_penalty": st.sampled_from([0.0, -1.0]),
    }
)


def with_penalties(params: SamplingParams, more: dict[str, float]) -> SamplingParams:
    import msgspec

    return msgspec.structs.replace(params, **more)


@given(
    params=st.lists(st.builds(with_penalties, controls, penalties), min_size=1, max_size=4),
    moves=st.lists(st.integers(1, 20), max_size=4),
    step_tokens=st.sampled_from([3, 16]),
)
@settings(max_examples=25, deadline=None)
def test_an_answer_that_moves_between_engines_is_the_same(vocabulary, params, moves, step_tokens) -> None:
    by_rid = {f"r{i}": p for i, p in enumerate(params)}
    whole, moved = ({rid: Answer() for rid in by_rid} for _ in range(2))
    Engine(vocabulary, step_tokens=64, depth=1).go_on(whole, by_rid)
    for until in [*sorted(moves), 10**6]:
        Engine(vocabulary, step_tokens=step_tokens, depth=1).go_on(moved, by_rid, until=until)
    for rid, p in by_rid.items():
        assert moved[rid].tokens == whole[rid].tokens
        assert moved[rid].finish == whole[rid].finish
        assert [a.top_ids for a in moved[rid].logprobs] == [a.top_ids for a in whole[rid].logprobs]
        assert len(whole[rid].logprobs) == (0 if p.logprobs is None else len(whole[rid].tokens))
        looks_right(whole[rid], p)


@given(params=st.lists(st.tuples(controls, penalties), min_size=1, max_size=4), depth=st.integers(2, 4))
@settings(max_examples=15, deadline=None)
def test_steps_in_flight_change_no_token(vocabulary, params, depth) -> None:
    by_rid = {f"r{i}": with_penalties(*p) for i, p in enumerate(params)}
    one, several = ({rid: Answer() for rid in by_rid} for _ in range(2))
    Engine(vocabulary, step_tokens=64, depth=1).go_on(one, by_rid)
    Engine(vocabulary, step_tokens=64, depth=depth).go_on(several, by_rid)
    assert {r: a.tokens for r, a in several.items()} == {r: a.tokens for r, a in one.items()}


def looks_right(answer: Answer, p: SamplingParams) -> None:
    """Ends come where the settings allow them, and text that ended by itself is in its grammar."""
    assert answer.finish in (FinishReason.STOP, FinishReason.LENGTH)
    assert len(answer.tokens) <= p.max_tokens
    if answer.finish is FinishReason.STOP:
        assert answer.tokens[-1] in p.stop_token_ids
        assert p.grammar is not None or len(answer.tokens) > p.min_tokens
    else:
        assert len(answer.tokens) == p.max_tokens
    if p.grammar is not None and p.grammar.source == REGEX and answer.tokens[-1] == END:
        assert re.fullmatch(REGEX, answer.text)
