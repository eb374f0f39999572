"""Grammars: what bodies may ask for, what answers look like, and that tokens say all there is to remember."""

from __future__ import annotations

import asyncio
import json
import random
import re
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from splitserve.engine.constraint import Constraints, Narrowed, without
from splitserve.engine.step import PENDING, Chunk, Row
from splitserve.errors import RequestError
from splitserve.server.openai import ChatBody
from splitserve.server.sglang import SglangSampling
from splitserve.server.structured import StructuredOutputs, grammar_of
from splitserve.text import grammar, tokenizer
from splitserve.text.grammar import MAX_SOURCE_CHARS, Vocabulary
from splitserve.types import Grammar, GrammarKind, SamplingParams
from tests.fake_engine import END, VOCAB, save_tokenizer

WIDTH = VOCAB + 5  # padded, as heads often are
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "maximum": 150, "minimum": 0},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
WORD = Grammar(GrammarKind.REGEX, "ab+c?")


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    return Vocabulary(tokenizer.load(save_tokenizer(tmp_path_factory.mktemp("words"))), WIDTH)


def tokens_of(mask: bytes) -> list[int]:
    return [i for i in range(WIDTH) if mask[i // 8] >> i % 8 & 1]


def text_of(tokens: list[int]) -> str:
    return bytes(t for t in tokens if t < 256).decode("utf-8", "replace")


# ------------------------------------------------------------------ bodies

ASKED: list[tuple[dict[str, Any], GrammarKind, str]] = [
    ({"response_format": {"type": "json_object"}}, GrammarKind.JSON_SCHEMA, '{"type": "object"}'),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "null"}},
            }
        },
        GrammarKind.JSON_SCHEMA,
        '{"type": "null"}',
    ),
    ({"json_schema": '{"type":"null"}'}, GrammarKind.JSON_SCHEMA, '{"type": "null"}'),
    ({"guided_json": {"type": "null"}}, GrammarKind.JSON_SCHEMA, '{"type": "null"}'),
    ({"regex": "a+"}, GrammarKind.REGEX, "a+"),
    ({"guided_regex": "a+"}, GrammarKind.REGEX, "a+"),
    ({"ebnf": 'root ::= "a"'}, GrammarKind.EBNF, 'root ::= "a"'),
    ({"guided_grammar": 'start: "a"'}, GrammarKind.EBNF, 'start: "a"'),
    ({"guided_choice": ["a", 'b"']}, GrammarKind.EBNF, 'start: "a" | "b\\""'),
    ({"structured_outputs": StructuredOutputs(regex="a")}, GrammarKind.REGEX, "a"),
    (
        {"structured_outputs": StructuredOutputs(json_object=True)},
        GrammarKind.JSON_SCHEMA,
        '{"type": "object"}',
    ),
]


@pytest.mark.parametrize(("fields", "kind", "source"), ASKED)
def test_every_api_s_fields_become_one_grammar(fields, kind, source) -> None:
    assert asyncio.run(grammar_of(ChatBody(**fields))) == Grammar(kind, source)


def test_bodies_that_ask_for_nothing_have_none() -> None:
    for fields in ({}, {"response_format": {"type": "text"}}, {"structured_outputs": StructuredOutputs()}):
        assert asyncio.run(grammar_of(ChatBody(**fields))) is None


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": [1]}}},
        "response_format.json_schema.schema",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "objekt"}}}},
        "response_format.json_schema.schema",
    ),
    ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
    ({"json_schema": "{"}, "json_schema"),
    ({"json_schema": "[1]"}, "json_schema"),
    ({"json_schema": '{"const": NaN}'}, "json_schema"),
    ({"json_schema": '{"type": "string"}, "lark_grammar": "start: /a/"'}, "json_schema"),
    ({"json_schema": {"$ref": "https://example.org/schema"}}, "json_schema"),
    ({"guided_json": {"type": "string", "pattern": "("}}, "guided_json"),
    ({"regex": "a("}, "regex"),
    ({"regex": ""}, "regex"),
    ({"regex": "a" * (MAX_SOURCE_CHARS + 1)}, "regex"),
    ({"ebnf": "root ::= ("}, "ebnf"),
    ({"ebnf": "root ::= nowhere"}, "ebnf"),
    ({"ebnf": "root ::= " + "(" * 5000}, "ebnf"),
    ({"ebnf": "start: nowhere"}, "ebnf"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_choice": ["a", ""]}, "guided_choice"),
    ({"structured_outputs": StructuredOutputs(grammar="?")}, "structured_outputs.grammar"),
    ({"regex": "a", "ebnf": 'root ::= "a"'}, "ebnf"),
    ({"regex": "a", "response_format": {"type": "json_object"}}, "response_format.json_object"),
]


@pytest.mark.parametrize(("fields", "name"), WRONG)
def test_a_wrong_grammar_is_a_400_that_names_its_field(fields, name) -> None:
    with pytest.raises(RequestError) as caught:
        asyncio.run(grammar_of(ChatBody(**fields)))
    assert caught.value.field == name
    assert len(caught.value.message) < 500


def test_sglang_s_fields_are_named_with_their_prefix() -> None:
    with pytest.raises(RequestError) as caught:
        asyncio.run(grammar_of(SglangSampling(regex="["), "sampling_params."))
    assert caught.value.field == "sampling_params.regex"


# ------------------------------------------------------------------ what answers look like

LOOKS: list[tuple[Grammar, Any]] = [
    (WORD, lambda text: re.fullmatch("ab+c?", text)),
    (Grammar(GrammarKind.REGEX, "[0-9]{3}-(é|ü)"), lambda text: re.fullmatch("[0-9]{3}-(é|ü)", text)),
    (
        grammar.from_choices(["yes", "no", 'n"\\o', "::= start:"]),
        ["yes", "no", 'n"\\o', "::= start:"].__contains__,
    ),
    (Grammar(GrammarKind.EBNF, 'root ::= "[" [a-c]+ "]"'), lambda text: re.fullmatch(r"\[[a-c]+\]", text)),
    (
        grammar.from_json_schema(PERSON, "x"),
        lambda text: 0 <= json.loads(text)["age"] <= 150 and set(json.loads(text)) == {"name", "age"},
    ),
]


@pytest.mark.parametrize(("wanted", "holds"), LOOKS)
@given(seed=st.integers(0, 2**32))
@settings(max_examples=12, deadline=None)
def test_whatever_is_chosen_from_the_masks_ends_as_the_grammar_says(vocabulary, wanted, holds, seed) -> None:
    rng, matcher = random.Random(seed), vocabulary.matcher(wanted)
    while END not in (may := tokens_of(matcher.mask())) or (rng.random() < 0.5 and len(may) > 1):
        matcher.read([rng.choice([t for t in may if t != END])])
        assert len(matcher.tokens) < 400, "bounded blanks make an end certain"
    assert holds(text_of(matcher.tokens))


@given(seed=st.integers(0, 2**32))
@settings(max_examples=20, deadline=None)
def test_a_matcher_made_again_from_the_tokens_masks_alike(vocabulary, seed) -> None:
    rng, wanted = random.Random(seed), grammar.from_json_schema(PERSON, "x")
    kept = vocabulary.matcher(wanted)
    for _ in range(rng.randrange(1, 30)):
        again = vocabulary.matcher(wanted)
        again.read(kept.tokens)
        assert again.mask() == kept.mask()
        if not (may := [t for t in tokens_of(kept.mask()) if t != END]):
            break
        kept.read([rng.choice(may)])


def test_tokens_outside_the_grammar_are_refused(vocabulary) -> None:
    with pytest.raises(RequestError, match="after 0 tokens"):
        vocabulary.matcher(WORD).read(b"xyz")


# ------------------------------------------------------------------ rows of a step


def row(answer: bytes = b"", *, pending: bool = False, rid: str = "r", **params: Any) -> Chunk:
    """The chunk that chooses the token after `answer` to a prompt of three tokens."""
    history = (1, 2, 3, *answer)
    stop = len(history)
    sampling = SamplingParams(**{"grammar": WORD, "stop_token_ids": (END,)} | params)
    return Chunk(
        rid,
        stop - 1,
        stop,
        (PENDING,) if pending else history[-1:],
        (0,),
        sample=True,
        sampling=sampling,
        history=history[:-1] if pending else history,
        num_prompt=3,
    )


def narrow(constraints: Constraints, *rows: Chunk | Row) -> Narrowed:
    made = [row if isinstance(row, Row) else Row(row) for row in rows]
    return constraints.narrow(made, width=WIDTH, device=torch.device("cpu"))


def choices(constraints: Constraints, *rows: Chunk | Row) -> list[str]:
    """The characters that each row may choose; "." is the end."""
    allowed = narrow(constraints, *rows).allowed
    assert allowed is not None
    return ["".join("." if t == END else chr(t) for t in r.nonzero()[:, 0].tolist()) for r in allowed]


def test_rows_follow_their_grammars_and_leave_others_free(vocabulary) -> None:
    free = row(b"ab", rid="free", grammar=None)
    got = choices(
        Constraints(lambda: vocabulary), row(rid="a"), row(b"a", rid="b"), row(b"ab", rid="c"), free
    )
    assert got[:3] == ["a", "b", "bc."]
    assert len(got[3]) == WIDTH


def test_a_step_without_grammars_never_loads_a_vocabulary() -> None:
    def never() -> Vocabulary:
        raise AssertionError("nobody asked for a grammar")

    narrowed = narrow(Constraints(never), row(grammar=None))
    assert narrowed.allowed is None


def test_ends_wait_for_min_tokens_and_ignore_eos_until_nothing_else_is_left(vocabulary) -> None:
    constraints = Constraints(lambda: vocabulary)
    assert choices(constraints, row(b"ab", min_tokens=5)) == ["bc"]
    assert choices(constraints, row(b"ab", min_tokens=2)) == ["bc."]
    assert choices(constraints, row(b"ab", ignore_eos=True)) == ["bc"]
    narrowed = narrow(constraints, row(b"abc", min_tokens=5))
    assert narrowed.allowed is not None
    assert narrowed.allowed[0].nonzero().tolist() == [[END]]
    assert narrowed.params[0].min_tokens == 0, "or the sampler would ban the only token left"


def test_a_pending_token_is_known_to_the_rank_that_chose_it(vocabulary) -> None:
    constraints = Constraints(lambda: vocabulary)
    assert choices(constraints, row(b"a")) == ["b"]
    constraints.chosen("r", b"b")
    assert choices(constraints, row(b"ab", pending=True)) == ["bc."]


def test_a_history_that_says_otherwise_wins_over_what_is_remembered(vocabulary) -> None:
    constraints = Constraints(lambda: vocabulary)
    choices(constraints, row(b"a"))
    constraints.chosen("r", b"b")
    assert choices(constraints, row(b"a")) == ["b"]  # computed again
    other = Grammar(GrammarKind.REGEX, "[xy]z")
    assert choices(constraints, row(b"x", grammar=other)) == ["z"]  # the same name, another request


def test_an_answer_that_left_its_grammar_is_refused_alone(vocabulary) -> None:
    constraints = Constraints(lambda: vocabulary)
    narrowed = narrow(constraints, row(b"xx", rid="bad"), row(b"a", rid="good"))
    assert set(narrowed.refusals) == {0}
    assert narrowed.allowed is not None
    assert narrowed.allowed[1].nonzero().tolist() == [[ord("b")]]


def guess(answer: bytes, ahead: bytes, **params: Any) -> tuple[Row, Row]:
    """The two rows of a step that tries `ahead`, one token."""
    plain = row(answer, **params)
    tried = msgspec.structs.replace(
        plain, stop=plain.stop + 1, tokens=(*plain.tokens, *ahead), num_draft=1, pages=(0,)
    )
    return Row(tried), Row(tried, tuple(ahead))


def test_the_row_behind_a_guess_has_the_mask_that_the_next_step_would_have(vocabulary) -> None:
    constraints = Constraints(lambda: vocabulary)
    for answer, ahead in ((b"", b"a"), (b"a", b"b"), (b"ab", b"b"), (b"ab", b"c")):
        here, behind = choices(constraints, *guess(answer, ahead))
        assert [here, behind] == choices(Constraints(lambda: vocabulary), row(answer), row(answer + ahead))
        assert choices(constraints, row(answer)) == [here], "the guess was only tried"
    assert choices(constraints, *guess(b"a", b"b", min_tokens=3)) == ["b", "bc"]


def test_rows_behind_forbidden_guesses_are_refused_and_behind_an_end_left_open(vocabulary) -> None:
    constraints = Constraints(lambda: vocabulary)
    forbidden = narrow(constraints, *guess(b"a", b"x"))
    assert set(forbidden.refusals) == {1}
    assert choices(constraints, row(b"a")) == ["b"]
    here, end = guess(b"ab", b"c")[0], Row(guess(b"ab", b"c")[0].chunk, (END,))
    allowed = narrow(constraints, here, end).allowed
    assert allowed is not None
    assert allowed[1].all()


def test_guesses_are_made_where_the_chosen_tokens_lead(vocabulary) -> None:
    constraints = Constraints(lambda: vocabulary)
    for chosen in (b"b", b"bb"):
        narrow(constraints, *guess(b"a", b"b"))
        constraints.chosen("r", chosen)
        assert choices(constraints, Row(guess(b"a", b"b")[0].chunk, tuple(chosen))) == ["bc."]
        assert choices(constraints, row(b"a" + chosen)) == ["bc."]


@given(bits=st.binary(min_size=4, max_size=4), tokens=st.sets(st.integers(0, 31)))
def test_without_clears_just_those_bits(bits, tokens) -> None:
    import numpy as np

    left = int.from_bytes(without(np.frombuffer(bits, dtype=np.uint8), tokens).tobytes(), "little")
    was = int.from_bytes(bits, "little")
    assert all((left >> i & 1) == ((was >> i & 1) and i not in tokens) for i in range(32))
