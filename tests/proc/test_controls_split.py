"""Each control of generation does what it says, and the same split as computed in one place, on real processes."""

from __future__ import annotations

import json
import random
import re
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from splitserve.text.byte_tokenizer import SPECIALS
from tests.proc.real import Deployment, until
from tests.tiny_chat import write_chat_checkpoint

pytestmark = pytest.mark.timeout(120)

END = SPECIALS.index("<|end|>")
rng = random.Random(3)
PROMPT = [rng.randrange(6, 262) for _ in range(70)]  # three chunks, four whole pages and a part
BASE: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
WARM = {"temperature": 1.0, "seed": 11}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "old": {"type": "boolean"}},
    "required": ["name", "old"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    deployment = Deployment(
        write_chat_checkpoint(tmp_path_factory.mktemp("model") / "tiny"), transport="local"
    )
    deployment.keep_rates(0.05)  # 50 MB/s: what this link has with other work on both cores, and more
    deployment.up()
    yield deployment
    deployment.close()


def both(pair: Deployment, path: str, body: dict[str, Any]) -> Any:
    """The answer through the pair, once it is that of decode computing all of it itself; nothing cached for either."""
    answers, rooms = [], [last_room(pair)]
    for at in ("router", "decode-0"):
        for name in ("prefill-0", "decode-0"):
            pair.call(name, "/debug/flush_cache", {})
        status, answer = pair.call(at, path, body)
        assert status == 200, answer
        answers.append(answer)
        rooms.append(last_room(pair))
    assert rooms[0] != rooms[1] == rooms[2], "only the split answer crosses"
    split, whole = (told(a) for a in answers)
    assert split == alike(whole)
    return answers[0]


def last_room(pair: Deployment) -> int | None:
    received = pair.call("decode-0", "/debug/handoffs")[1]["received"]
    return received[-1]["room"] if received else None


def told(answer: Any) -> Any:
    """What an answer says of the model's output, without names and times."""
    if isinstance(answer, list):
        return [told(a) for a in answer]
    if "choices" in answer:
        return answer["choices"]
    meta = {k: v for k, v in answer["meta_info"].items() if k not in ("id", "e2e_latency", "cached_tokens")}
    return [answer["text"], answer["output_ids"], meta]


def alike(value: Any) -> Any:
    """Equal in everything but the last digits of its logprobs."""
    if isinstance(value, float):
        return pytest.approx(value, abs=1e-4)
    if isinstance(value, dict):
        return {k: alike(v) for k, v in value.items()}
    return [alike(v) for v in value] if isinstance(value, list) else value


def only(answer: Any) -> str:
    return str(answer["choices"][0]["text"])


def differs(answer: Any, plain: str) -> bool:
    return only(answer) != plain


def ended(answer: Any, reason: str, num: int) -> bool:
    return answer["choices"][0]["finish_reason"] == reason and answer["usage"]["completion_tokens"] == num


def matches(pattern: str) -> Callable[[Any, str], Any]:
    return lambda answer, _: re.fullmatch(pattern, only(answer))


Control = tuple[dict[str, Any], Callable[[Any, str], Any]]
CONTROLS: dict[str, Control] = {
    "greedy": ({}, lambda a, plain: only(a) == plain),
    "temperature": (WARM, differs),
    "seed": ({**WARM, "seed": -5}, differs),
    "top_k": ({**WARM, "top_k": 1}, lambda a, plain: only(a) == plain),
    "top_p": ({**WARM, "top_p": 1e-9}, lambda a, plain: only(a) == plain),
    "min_p": ({**WARM, "min_p": 1.0}, lambda a, plain: only(a) == plain),
    "filters": ({**WARM, "top_k": 40, "top_p": 0.8, "min_p": 0.01}, differs),
    "repetition_penalty": ({"repetition_penalty": 3.0}, differs),
    "presence_penalty": ({"presence_penalty": 2.0, "max_tokens": 60}, differs),
    "frequency_penalty": ({"frequency_penalty": 2.0, "max_tokens": 60}, differs),
    "logit_bias": ({"logit_bias": {"100": 100}}, lambda a, _: len(set(only(a))) == 1),
    "max_tokens": ({"max_tokens": 1}, lambda a, _: ended(a, "length", 1)),
    "eos": ({"ignore_eos": False, "logit_bias": {str(END): 100}}, lambda a, _: ended(a, "stop", 1)),
    "min_tokens": (
        {"ignore_eos": False, "logit_bias": {str(END): 100}, "min_tokens": 5},
        lambda a, _: ended(a, "stop", 6),
    ),
    "ignore_eos": ({"logit_bias": {str(END): 100}}, lambda a, _: ended(a, "length", 12)),
    "stop_token_ids": (
        {"stop_token_ids": [100], "logit_bias": {"100": 100}, "min_tokens": 3},
        lambda a, _: ended(a, "stop", 4),
    ),
    "n": (
        {**WARM, "n": 3, "logprobs": 2},
        lambda a, _: (
            len({c["text"] for c in a["choices"]}) == 3
            and [len(c["logprobs"]["tokens"]) for c in a["choices"]] == [12] * 3
        ),
    ),
    "logprobs": ({"logprobs": 5}, lambda a, _: [len(t) for t in a["choices"][0]["logprobs"]["top_logprobs"]]),
    "echo": ({"echo": True, "logprobs": 1}, lambda a, _: len(a["choices"][0]["logprobs"]["tokens"]) == 82),
    "regex": ({"regex": "[a-f]{2}x[0-9]+y", **WARM}, lambda a, _: re.match("[a-f]{2}x[0-9]+", only(a))),
    "regex from its first token": ({"regex": "q"}, lambda a, _: only(a) == "q" and ended(a, "stop", 2)),
    "ebnf": ({"ebnf": 'root ::= "<" [a-c]{4} ">"', **WARM}, matches("<[abc]{4}>")),
    "choice": ({"guided_choice": ["left", "right", "é"]}, matches("left|right|é")),
    "json_object": (
        {"response_format": {"type": "json_object"}, **WARM},
        lambda a, _: only(a).startswith("{"),
    ),
    "json_schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON}}, **WARM}
        | {"max_tokens": 400},
        lambda a, _: set(json.loads(only(a))) == {"name", "old"},
    ),
    "everything": (
        {**WARM, "structured_outputs": {"regex": "[a-z ]{8,30}"}, "top_k": 50, "top_p": 0.95, "min_tokens": 4}
        | {"repetition_penalty": 1.2, "presence_penalty": 0.5, "logit_bias": {"50": 3}, "n": 2, "logprobs": 3}
        | {"max_tokens": 40, "stop": ["zz"]},
        lambda a, _: all(re.fullmatch("[a-z ]{1,30}", c["text"]) for c in a["choices"]),
    ),
}


@pytest.fixture(scope="module")
def plain(pair: Deployment) -> dict[int, str]:
    """What the model says greedily, by the number of tokens."""
    return {n: only(pair.call("decode-0", "/v1/completions", {**BASE, "max_tokens": n})[1]) for n in (12, 60)}


@pytest.mark.parametrize("name", CONTROLS)
def test_each_control_gives_the_same_result_split_and_unified(pair, plain, name) -> None:
    extra, shows = CONTROLS[name]
    body = {**BASE, **extra}
    answer = both(pair, "/v1/completions", body)
    assert shows(answer, plain.get(body["max_tokens"], "")), answer


def test_a_stop_string_ends_the_text_before_it(pair, plain) -> None:
    stop = plain[12][4:6]
    answer = both(pair, "/v1/completions", {**BASE, "stop": [stop], "logprobs": 0})
    assert only(answer) == plain[12][: plain[12].index(stop)]
    assert answer["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    "extra",
    [
        {"return_logprob": True, "top_logprobs_num": 3},
        {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 1},
        {"regex": "[0-9]{5}", "n": 2, "temperature": 1.0, "sampling_seed": 4},
        {"json_schema": json.dumps(PERSON), "max_new_tokens": 100},
    ],
)
def test_sglang_s_fields_give_the_same_result_split_and_unified(pair, extra) -> None:
    names = ("return_logprob", "top_logprobs_num", "logprob_start_len")
    outer = {k: v for k, v in extra.items() if k in names}
    sampling = {"temperature": 0, "max_new_tokens": 9, "ignore_eos": True} | {
        k: v for k, v in extra.items() if k not in names
    }
    answer = both(pair, "/generate", {"input_ids": PROMPT, "sampling_params": sampling, **outer})
    if "regex" in extra:
        assert all(re.fullmatch("[0-9]{5}", a["text"]) for a in answer)
    if "logprob_start_len" in extra:
        assert len(answer["meta_info"]["input_token_logprobs"]) == len(PROMPT)


def test_choices_share_their_prompt(pair) -> None:
    """The pages of the first choice's prompt are found by the others: all whole ones but the last token's."""
    for name in ("prefill-0", "decode-0"):
        pair.call(name, "/debug/flush_cache", {})
    before = pair.call("decode-0", "/debug/stats")[1]["counters"]
    status, answer = pair.call("decode-0", "/v1/completions", {**BASE, **WARM, "n": 4})
    assert status == 200, answer
    after = pair.call("decode-0", "/debug/stats")[1]["counters"]
    computed = after["prompt_tokens"] - before["prompt_tokens"]
    cached = after["cached_tokens"] - before["cached_tokens"]
    assert computed + cached == 4 * len(PROMPT)
    assert cached == 3 * 64


@pytest.mark.parametrize("at", ["router", "decode-0", "prefill-0"])
def test_a_grammar_that_is_wrong_is_a_400_with_its_field(pair, at) -> None:
    status, answer = pair.call(at, "/v1/completions", {**BASE, "regex": "a("})
    assert status == 400, answer
    assert answer["error"]["param"] == "regex"
    pair.check()


LINK = "prefill-0 rank 0 to decode-0 rank 0"


def slow_writes(pair: Deployment) -> float:
    with urllib.request.urlopen(pair.url("prefill-0") + "/metrics", timeout=10.0) as answer:
        lines = answer.read().decode().splitlines()
    name = f'splitserve_handoff_slow_writes_total{{pair="{LINK}"}}'
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


def test_a_link_slower_than_a_quarter_of_what_the_doctor_measured_is_warned_of_by_name(
    pair: Deployment,
) -> None:
    assert "direction put" in pair.run("up", str(pair.file), "--dry-run").stdout
    fresh = [random.Random(n).sample(range(6, 262), 64) for n in range(2)]
    pair.generate(fresh[0], 2)
    before = slow_writes(pair)
    pair.call("prefill-0", "/debug/plant", {"fault": "slow_link", "ms": 300})
    pair.generate(fresh[1], 2)
    pair.call("prefill-0", "/debug/plant", {"fault": "slow_link", "ms": 0})
    until("the metric counts it", lambda: slow_writes(pair) > before, within_s=5.0)
    assert f"{LINK} crossed at" in pair.run("logs", pair.name, "prefill-0").stdout
