"""What a body may say: each mistake is a 400 or 404 that names the field; what passes becomes the right Job."""

import asyncio
import json

import pytest

from splitserve.errors import ModelNotFound, RequestError
from splitserve.server.intake import Intake
from splitserve.server.params import ModelLimits
from splitserve.server.rooms import Place, derived_seed
from splitserve.text import tokenizer
from splitserve.text.chat import ChatTemplate
from splitserve.text.tokenizer import Templates
from splitserve.types import Role
from splitserve.wire import Room
from tests.fake_engine import END, VOCAB, save_tokenizer

MAX_LEN = 512
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
TEXT = {"prompt": "Hi"}
GEN = {"text": "Hi"}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    found = tokenizer.load(save_tokenizer(tmp_path_factory.mktemp("model")))

    def intake(role=Role.UNIFIED, **place) -> Intake:
        at = {"host": "10.0.0.1", "port": 8998, "allow_hosts": ("127.0.0.1", "prefill.local")} | place
        return Intake(
            names=("tiny", "/models/tiny"),
            tokenizer=found,
            chat=ChatTemplate(found.templates),
            limits=ModelLimits(max_len=MAX_LEN, vocab_size=VOCAB, eos_ids=found.eos_ids),
            place=Place(role=role, **at),
        )

    return intake


def job(intake: Intake, path: str, body, headers=None):
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    made = {"chat": intake.chat_job, "text": intake.completion_job, "gen": intake.generate_job}[path]
    return asyncio.run(made(raw, headers or {}))


BAD_JSON = [
    (b"", "messages"),
    (b"{", None),
    (b"[1]", None),
    (b'"x"', None),
    (b"null", None),
    (b"[" * 100_000, None),
    (b'{"messages":' * 5000, None),
    (b'{"messages": "\xff\xfe"}', None),
    (b'{"temperature": NaN}', None),
    (b'{"temperature": Infinity}', None),
    (b'{"temperature": 1e999}', None),
    (b'{"max_tokens": ' + b"9" * 5000 + b"}", None),
    (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', None),
]


@pytest.mark.parametrize(("raw", "field"), BAD_JSON)
def test_broken_json(made, raw, field):
    with pytest.raises(RequestError) as caught:
        job(made(), "chat", raw)
    assert caught.value.status == 400
    assert caught.value.field == field


@pytest.mark.parametrize("given", [0.0, 1e-45, 1e-39, 9e-6])
def test_a_temperature_too_small_to_divide_by_is_greedy(made, given):
    body = json.dumps({**CHAT, "temperature": given}).encode()
    assert job(made(), "chat", body)[0].sampling.temperature == 0


SHARED = [
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 1e30}, "temperature"),
    ({"temperature": [1]}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.01}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"top_k": True}, "top_k"),
    ({"top_k": 2**70}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": 11}, "repetition_penalty"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"260": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias[5]"),
    ({"logit_bias": {"5": "a"}}, "logit_bias[...]"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": "a" * 1025}, "stop"),
    ({"stop": [1]}, "stop[0]"),
    ({"stop_token_ids": [VOCAB]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [1] * 129}, "stop_token_ids"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": 2.5}, "n"),
    ({"ignore_eos": "yes"}, "ignore_eos"),
    ({"skip_special_tokens": 1}, "skip_special_tokens"),
    ({"regex": "a("}, "regex"),
    ({"no_such_field": 1}, "no_such_field"),
]


@pytest.mark.parametrize(("extra", "field"), SHARED)
@pytest.mark.parametrize("path", ["chat", "text", "gen"])
def test_wrong_sampling_values_name_the_field(made, path, extra, field):
    base = {"chat": CHAT, "text": TEXT, "gen": GEN}[path]
    body = {**GEN, "sampling_params": extra} if path == "gen" else {**base, **extra}
    with pytest.raises(RequestError) as caught:
        job(made(), path, body)
    assert caught.value.field == (f"sampling_params.{field}" if path == "gen" else field)
    assert caught.value.status == 400
    assert caught.value.message.startswith(("unknown", caught.value.field.split("[")[0]))


OWN = [
    ("chat", {"messages": []}, "messages"),
    ("chat", {"messages": None}, "messages"),
    ("chat", {"messages": "Hi"}, "messages"),
    ("chat", {"messages": [1]}, "messages[0]"),
    ("chat", {"messages": [{"content": "x"}]}, "messages[0].role"),
    ("chat", {"messages": [{"role": 1, "content": "x"}]}, "messages[0].role"),
    ("chat", {"messages": [{"role": "user"}]}, "messages[0].content"),
    ("chat", {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ("chat", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
    ("chat", {**CHAT, "max_tokens": -1}, "max_tokens"),
    ("chat", {**CHAT, "max_tokens": MAX_LEN}, "max_tokens"),
    ("chat", {**CHAT, "max_completion_tokens": 10**9}, "max_completion_tokens"),
    ("chat", {**CHAT, "max_tokens": 1, "max_completion_tokens": 1}, "max_tokens"),
    ("chat", {**CHAT, "max_tokens": 2, "min_tokens": 3}, "min_tokens"),
    ("chat", {**CHAT, "min_tokens": -1}, "min_tokens"),
    ("chat", {**CHAT, "top_logprobs": 21, "logprobs": True}, "top_logprobs"),
    ("chat", {**CHAT, "top_logprobs": 2}, "top_logprobs"),
    ("chat", {**CHAT, "logprobs": 3}, "logprobs"),
    ("chat", {**CHAT, "seed": 2**65}, "seed"),
    ("chat", {**CHAT, "seed": "a"}, "seed"),
    ("chat", {**CHAT, "stream": "true"}, "stream"),
    ("chat", {**CHAT, "stream_options": {"include_usage": True}}, "stream_options"),
    ("chat", {**CHAT, "stream": True, "stream_options": 1}, "stream_options"),
    (
        "chat",
        {**CHAT, "stream": True, "stream_options": {"include_usage": 1}},
        "stream_options.include_usage",
    ),
    ("chat", {**CHAT, "response_format": {"type": "xml"}}, "response_format.type"),
    ("chat", {**CHAT, "tool_choice": "required"}, "tool_choice"),
    ("chat", {**CHAT, "tools": "x"}, "tools"),
    ("chat", {**CHAT, "chat_template": "{{ 1 }}"}, "chat_template"),
    ("chat", {**CHAT, "chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs"),
    ("chat", {**CHAT, "rid": "x" * 600}, "rid"),
    ("chat", {**CHAT, "n": 3, "rid": ["a", "b"]}, "rid"),
    ("chat", {**CHAT, "priority": 2**40}, "priority"),
    ("chat", {**CHAT, "return_hidden_states": True}, "return_hidden_states"),
    ("chat", {**CHAT, "kv_transfer_params": {"do_remote_decode": 7}}, "kv_transfer_params.do_remote_decode"),
    ("text", {}, "prompt"),
    ("text", {"prompt": ""}, "prompt"),
    ("text", {"prompt": []}, "prompt"),
    ("text", {"prompt": ["a", ""]}, "prompt[1]"),
    ("text", {"prompt": ["a", 1]}, "prompt[1]"),
    ("text", {"prompt": [1, "a"]}, "prompt"),
    ("text", {"prompt": [1, True]}, "prompt"),
    ("text", {"prompt": [1, 2.0]}, "prompt"),
    ("text", {"prompt": [VOCAB]}, "prompt"),
    ("text", {"prompt": [-1]}, "prompt"),
    ("text", {"prompt": [2**80]}, "prompt"),
    ("text", {"prompt": [[1], []]}, "prompt[1]"),
    ("text", {"prompt": [[1], [[1]]]}, "prompt[1]"),
    ("text", {"prompt": {"a": 1}}, "prompt"),
    ("text", {"prompt": 5}, "prompt"),
    ("text", {"prompt": ["a"] * 1025}, "prompt"),
    ("text", {"prompt": "x" * MAX_LEN}, "prompt"),
    ("text", {"prompt": "x" * 500, "max_tokens": 13}, "max_tokens"),
    ("text", {**TEXT, "logprobs": 21}, "logprobs"),
    ("text", {**TEXT, "logprobs": -1}, "logprobs"),
    ("text", {**TEXT, "best_of": 2}, "best_of"),
    ("text", {**TEXT, "suffix": "x"}, "suffix"),
    ("gen", {}, "text"),
    ("gen", {"text": "a", "input_ids": [1]}, "text"),
    ("gen", {"text": 5}, "text"),
    ("gen", {"text": ""}, "text"),
    ("gen", {"input_ids": []}, "input_ids"),
    ("gen", {"input_ids": [999]}, "input_ids"),
    ("gen", {"input_ids": "ab"}, "input_ids"),
    ("gen", {**GEN, "sampling_params": []}, "sampling_params"),
    ("gen", {**GEN, "sampling_params": {"max_new_tokens": 600}}, "sampling_params.max_new_tokens"),
    ("gen", {**GEN, "sampling_params": {"max_new_tokens": "5"}}, "sampling_params.max_new_tokens"),
    ("gen", {**GEN, "sampling_params": {"seed": -(2**63) - 1}}, "sampling_params.seed"),
    ("gen", {**GEN, "top_logprobs_num": 1}, "top_logprobs_num"),
    ("gen", {**GEN, "return_logprob": True, "top_logprobs_num": 100}, "top_logprobs_num"),
    ("gen", {**GEN, "return_logprob": True, "logprob_start_len": -2}, "logprob_start_len"),
    ("gen", {**GEN, "image_data": ["x"]}, "image_data"),
    ("gen", {**GEN, "lora_path": "x"}, "lora_path"),
    ("gen", {**GEN, "temperature": 0.5}, "temperature"),
]


@pytest.mark.parametrize(("path", "body", "field"), OWN)
def test_wrong_bodies_name_the_field(made, path, body, field):
    with pytest.raises(RequestError) as caught:
        job(made(), path, body)
    assert (caught.value.field, caught.value.status) == (field, 400)


@pytest.mark.parametrize(
    ("call", "body", "field"),
    [
        ("completion_job", {"prompt": "a " * 500_000}, "prompt"),
        ("completion_job", {"prompt": ["a " * 500_000, "Hi"]}, "prompt[0]"),
        ("generate_job", {"text": "a " * 500_000}, "text"),
        ("chat_job", {"messages": [{"role": "user", "content": "a " * 500_000}]}, "messages"),
    ],
)
def test_a_text_that_can_never_fit_is_not_even_read(made, monkeypatch, call, body, field):
    monkeypatch.setattr(tokenizer.Tokenizer, "encode", lambda *_, **__: pytest.fail("it was read"))
    with pytest.raises(RequestError, match=r"has 1\d+ characters, and no more than \d+ can fit") as e:
        asyncio.run(getattr(made(), call)(json.dumps(body).encode(), {}))
    assert e.value.field == field


def test_a_prompt_that_is_too_long_says_both_numbers(made):
    with pytest.raises(RequestError, match=r"600 tokens.* 512"):
        job(made(), "text", {"prompt": "x" * 600})
    with pytest.raises(RequestError, match=r"max_tokens is 13.*500 tokens.*512") as caught:
        job(made(), "text", {"prompt": "x" * 500, "max_tokens": 13})
    assert caught.value.fix == "ask for at most 12"


@pytest.mark.parametrize("path", ["chat", "text", "gen"])
def test_model_names(made, path):
    base = {"chat": CHAT, "text": TEXT, "gen": GEN}[path]
    with pytest.raises(ModelNotFound) as caught:
        job(made(), path, {**base, "model": "gpt-5"})
    assert (caught.value.status, caught.value.code) == (404, "model_not_found")
    for name in ("tiny", "/models/tiny", "unknown", None, ""):
        job(made(), path, {**base, "model": name})


def test_no_template_is_a_400(made):
    bare = made()
    bare = Intake(bare.names, bare.tokenizer, ChatTemplate(Templates()), bare.limits, bare.place)
    with pytest.raises(RequestError, match="no chat template"):
        job(bare, "chat", CHAT)


# ------------------------------------------------------------------ what passes

SENT_BY_OTHERS = [
    # sglang_router, chat, completions, generate; bench_serving; vllm bench serve; the openai client's extras
    ("chat", {**CHAT, "logprobs": False, "max_completion_tokens": 4, "stream": True, "no_stop_trim": False,
              "ignore_eos": False, "continue_final_message": False, "skip_special_tokens": True,
              "separate_reasoning": True, "stream_reasoning": True, "return_hidden_states": False}),
    ("text", {**TEXT, "echo": False, "no_stop_trim": False, "ignore_eos": False, "skip_special_tokens": True,
              "return_hidden_states": False}),
    ("gen", {**GEN, "model": None, "return_text_in_logprobs": False, "stream": False, "log_metrics": True,
             "return_hidden_states": False, "background": False, "no_logs": False, "return_bytes": False,
             "return_entropy": False, "lora_path": None, "seed": 7}),
    ("gen", {**GEN, "sampling_params": {"temperature": 0.0, "max_new_tokens": 4, "ignore_eos": True}, "stream": True,
             "lora_path": None, "return_logprob": False, "return_routed_experts": False, "logprob_start_len": -1}),
    ("text", {**TEXT, "best_of": 1, "max_tokens": 3, "stream": True, "temperature": 0.0, "ignore_eos": True}),
    ("text", {**TEXT, "repetition_penalty": 1.0, "logprobs": None, "stream": True,
              "stream_options": {"include_usage": True}}),
    ("chat", {**CHAT, "user": "u", "store": False, "metadata": {"a": "b"}, "service_tier": "auto", "verbosity": "low",
              "parallel_tool_calls": True, "modalities": ["text"], "response_format": {"type": "text"},
              "tool_choice": "none", "reasoning_effort": "low", "prediction": None, "logit_bias": None}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body"), SENT_BY_OTHERS)
def test_what_routers_and_clients_send_is_accepted(made, path, body):
    job(made(), path, body)


def test_a_chat_job(made):
    body = {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]}],
        "temperature": 0.5, "top_k": -1, "top_p": 0.9, "min_p": 0.1, "logit_bias": {"5": -100}, "stop": "x",
        "stop_token_ids": [7], "seed": -1, "n": 2, "logprobs": True, "top_logprobs": 3, "rid": "me", "priority": 2,
    }  # fmt: skip
    got, style = job(made(), "chat", body)
    assert bytes(t for t in got.prompts[0].tokens if t < 256) == b"A\nB"
    assert got.prompts[0].tokens[0] == 258  # <|user|>
    s = got.sampling
    assert (s.temperature, s.top_k, s.top_p, s.min_p, s.logit_bias) == (0.5, 0, 0.9, 0.1, {5: -100.0})
    assert s.stop_token_ids == (7, END)
    assert s.max_tokens == MAX_LEN - len(got.prompts[0].tokens)
    assert (got.seeds, got.rids, got.n, got.priority) == ((2**64 - 1,), ("me_0", "me_1"), 2, 2)
    assert got.rules.stops == ("x",)
    assert (style.logprobs, style.answer_id) == (3, "me")


def test_ignore_eos_leaves_the_model_no_end(made):
    got, _ = job(made(), "text", {**TEXT, "ignore_eos": True, "stop_token_ids": [4]})
    assert got.sampling.stop_token_ids == (4,)


def test_defaults_of_the_protocols(made):
    assert job(made(), "text", TEXT)[0].sampling.max_tokens == 16
    assert job(made(), "gen", GEN)[0].sampling.max_tokens == 128
    assert job(made(), "text", {"prompt": "x" * 510})[0].sampling.max_tokens == 2


def test_prompt_lists(made):
    got, _ = job(made(), "text", {"prompt": ["a", "bc"], "n": 2})
    assert [p.tokens for p in got.prompts] == [[97], [98, 99]]
    assert len(got.rids) == 4
    assert len(set(got.seeds)) == 2  # equal prompts must not get equal answers
    got, _ = job(made(), "text", {"prompt": [[1, 2], [3]]})
    assert [p.tokens for p in got.prompts] == [[1, 2], [3]]
    got, _ = job(made(), "gen", {"input_ids": [1, 2]})
    assert [p.tokens for p in got.prompts] == [[1, 2]]


def test_zero_output_runs_and_is_discarded(made):
    got, _ = job(made(), "text", {**TEXT, "max_tokens": 0, "echo": True, "logprobs": 1})
    assert got.discard
    assert got.sampling.max_tokens == 1
    assert got.sampling.prompt_logprobs == 1


def test_x_request_id_becomes_the_rid(made):
    got, style = job(made(), "chat", CHAT, {"x-request-id": "abc"})
    assert got.rids == ("abc",)
    assert style.answer_id.startswith("chatcmpl-")


# ------------------------------------------------------------------ rooms

MEET = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 9000, "bootstrap_room": 77}


def test_halves_and_rooms(made):
    decode, _ = job(made(Role.DECODE), "gen", {**GEN, **MEET})
    prefill, _ = job(made(Role.PREFILL), "gen", {**GEN, **MEET})
    assert (decode.half, decode.rooms) == ("decode", (Room(77, "127.0.0.1", 9000),))
    assert (prefill.half, prefill.rooms[0].id) == ("prefill", 77)
    assert decode.seeds == prefill.seeds == (derived_seed(77),)
    whole, _ = job(made(Role.DECODE), "gen", GEN)
    assert (whole.half, whole.rooms) == ("", ())


def test_null_port_is_own_on_prefill_and_400_on_decode(made):
    body = {**CHAT, **MEET, "bootstrap_port": None}
    assert job(made(Role.PREFILL), "chat", body)[0].rooms == (Room(77, "10.0.0.1", 8998),)
    with pytest.raises(RequestError, match="must know where prefill listens") as caught:
        job(made(Role.DECODE), "chat", body)
    assert caught.value.field == "bootstrap_port"
    assert "--prefill" in (caught.value.fix or "")


def test_lists_of_rooms(made):
    body = {
        **CHAT,
        "n": 2,
        "bootstrap_host": ["127.0.0.1"] * 2,
        "bootstrap_port": [1, 1],
        "bootstrap_room": [5, 9],
    }
    assert [r.id for r in job(made(Role.DECODE), "chat", body)[0].rooms] == [5, 9]
    one_for_all = {**CHAT, **MEET, "n": 3}
    assert [r.id for r in job(made(Role.DECODE), "chat", one_for_all)[0].rooms] == [77, 78, 79]
    prompts = {"prompt": ["a", "b"], "n": 2, **MEET, "bootstrap_room": [10, 20]}
    assert [r.id for r in job(made(Role.DECODE), "text", prompts)[0].rooms] == [10, 11, 20, 21]


def test_prefill_keeps_its_handoff_whatever_the_first_token_says(made):
    got, _ = job(made(Role.PREFILL), "chat", {**CHAT, **MEET, "stop": ["a"]})
    assert got.rules.stops == ()


@pytest.mark.parametrize(
    ("role", "change", "field"),
    [
        (Role.UNIFIED, {}, "bootstrap_room"),
        (Role.DECODE, {"bootstrap_room": None}, "bootstrap_room"),
        (Role.DECODE, {"bootstrap_room": -1}, "bootstrap_room"),
        (Role.DECODE, {"bootstrap_room": 2**63}, "bootstrap_room"),
        (Role.DECODE, {"bootstrap_room": "7"}, "bootstrap_room"),
        (Role.DECODE, {"bootstrap_room": [1, 2]}, "bootstrap_room"),
        (Role.DECODE, {"bootstrap_room": [None]}, "bootstrap_room"),
        (Role.DECODE, {"bootstrap_room": [5, 5], "n": 2}, "bootstrap_room"),
        (Role.DECODE, {"bootstrap_host": None}, "bootstrap_host"),
        (Role.DECODE, {"bootstrap_host": "evil.example"}, "bootstrap_host"),
        (Role.DECODE, {"bootstrap_host": ["127.0.0.1"] * 3}, "bootstrap_host"),
        (Role.DECODE, {"bootstrap_host": 5}, "bootstrap_host"),
        (Role.DECODE, {"bootstrap_port": 0}, "bootstrap_port"),
        (Role.DECODE, {"bootstrap_port": 70_000}, "bootstrap_port"),
        (Role.DECODE, {"bootstrap_port": "x"}, "bootstrap_port"),
    ],
)
def test_wrong_rooms(made, role, change, field):
    with pytest.raises(RequestError) as caught:
        job(made(role), "chat", {**CHAT, **MEET, **change})
    assert (caught.value.field, caught.value.status) == (field, 400)
