"""The text side of one answer: whole characters, nothing of a stop, logprobs that belong to what is shown."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve.server.choice import Choice, Ending
from splitserve.server.params import TextRules
from splitserve.text import tokenizer
from splitserve.types import FinishReason, TokenEvent
from tests.fake_engine import END, logprobs_of, save_tokenizer


@pytest.fixture(scope="module")
def bytewise(tmp_path_factory) -> tokenizer.Tokenizer:
    return tokenizer.load(save_tokenizer(tmp_path_factory.mktemp("model")))


def events(raw: bytes, *, size: int = 1, finish=FinishReason.LENGTH, logprobs=True, matched=None):
    groups = [raw[i : i + size] for i in range(0, len(raw), size)]
    return [
        TokenEvent(
            "r",
            tokens=tuple(group),
            logprobs=tuple(logprobs_of(t, 1) for t in group) if logprobs else (),
            finish=finish if i == len(groups) - 1 else None,
            matched_stop=matched if i == len(groups) - 1 else None,
        )
        for i, group in enumerate(groups)
    ]


def play(choice: Choice, what) -> tuple[list[str], list[int], Ending | None]:
    texts, shown = [], []
    for event in what:
        delta = choice.feed(event)
        texts.append(delta.text)
        shown += [e.token for e in delta.entries]
        if delta.ending is not None:
            break
    return texts, shown, choice.ending


def test_characters_are_whole_and_logprobs_come_with_their_text(bytewise):
    choice = Choice(bytewise, TextRules())
    texts, shown, ending = play(choice, events("a😀é".encode()))
    assert texts == ["a", "", "", "", "😀", "", "é"]
    assert shown == list("a😀é".encode())
    assert ending == Ending(FinishReason.LENGTH)


def test_an_unfinished_character_is_flushed_at_the_end(bytewise):
    choice = Choice(bytewise, TextRules())
    play(choice, events("a😀".encode()[:-1]))
    assert choice.text == "a\ufffd"


def test_end_token_counts_but_has_no_text(bytewise):
    choice = Choice(bytewise, TextRules(skip_special=False))
    done = TokenEvent("r", tokens=(END,), finish=FinishReason.STOP, matched_stop=END)
    _, shown, ending = play(choice, [*events(b"ab", finish=None), done])
    assert (choice.text, choice.tokens, shown) == ("ab", [97, 98, END], [97, 98])
    assert ending == Ending(FinishReason.STOP, END)
    kept = Choice(bytewise, TextRules(skip_special=False, keep_stop=True))
    play(kept, [*events(b"ab", finish=None), done])
    assert kept.text == "ab<|end|>"


def test_a_prefill_half_ends_after_its_only_token(bytewise):
    """The stop is known with the token; the end comes when the rows have left."""
    choice = Choice(bytewise, TextRules())
    assert choice.feed(TokenEvent("r", tokens=(END,), matched_stop=END)).ending is None
    assert choice.feed(TokenEvent("r", finish=FinishReason.STOP)).ending == Ending(FinishReason.STOP, END)


def test_stop_string_in_the_middle_of_an_event_drops_later_tokens(bytewise):
    choice = Choice(bytewise, TextRules(stops=("##",)))
    texts, shown, ending = play(choice, events(b"ab#c##xyz", size=9, finish=None))
    assert ("".join(texts), ending) == ("ab#c", Ending(FinishReason.STOP, "##"))
    assert bytes(shown) == b"ab#c"
    assert bytes(choice.tokens) == b"ab#c##"


def test_min_tokens_makes_stops_wait(bytewise):
    choice = Choice(bytewise, TextRules(stops=("b",)), min_tokens=3)
    texts, _, ending = play(choice, events(b"abacb", finish=None))
    assert ("".join(texts), ending) == ("abac", Ending(FinishReason.STOP, "b"))


def test_discarded_output_is_neither_shown_nor_counted(bytewise):
    choice = Choice(bytewise, TextRules(), discard=True)
    play(choice, events(b"a"))
    assert (choice.text, choice.tokens, choice.ending) == ("", [], Ending(FinishReason.LENGTH))


@given(
    text=st.text(alphabet="ab#é😀", min_size=1, max_size=24),
    stops=st.lists(st.text(alphabet="ab#é", min_size=1, max_size=4), max_size=3),
    size=st.integers(1, 5),
    keep=st.booleans(),
)
def test_shown_text_and_entries_agree(bytewise, text, stops, size, keep):
    raw = text.encode()
    choice = Choice(bytewise, TextRules(stops=tuple(stops), keep_stop=keep))
    texts, shown, ending = play(choice, events(raw, size=size))
    whole = Choice(bytewise, TextRules(stops=tuple(stops), keep_stop=keep))
    play(whole, events(raw, size=len(raw)))
    assert "".join(texts) == choice.text == whole.text
    assert text.startswith(choice.text)
    if not keep:
        assert not any(s in choice.text for s in stops)
    assert ending is not None
    # Entries are those of the shown text, and each choice of event sizes gives the same.
    assert bytes(shown) == choice.text.encode()
