"""Any body whatever is a Job or a RequestError: never another exception, never a value out of range."""

import asyncio
import json
import math

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from splitserve import wire
from splitserve.errors import RequestError
from splitserve.server.intake import Intake
from splitserve.server.openai import ChatBody, CompletionBody
from splitserve.server.params import ModelLimits
from splitserve.server.rooms import Place
from splitserve.server.sglang import GenerateBody, SglangSampling
from splitserve.text import tokenizer
from splitserve.text.chat import ChatTemplate
from splitserve.types import Role
from tests.fake_engine import VOCAB, save_tokenizer

MAX_LEN = 64

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.integers(-3, 70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.just("x" * 100),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system"]), "content": VALUES | st.text(max_size=5)}
    ),
    max_size=2,
)


def bodies(base: st.SearchStrategy[dict], fields: tuple[str, ...]) -> st.SearchStrategy[dict]:
    extra = st.dictionaries(st.sampled_from(fields) | st.text(max_size=6), VALUES, max_size=4)
    return st.tuples(base, extra).map(lambda two: {**two[0], **two[1]})


BODIES = {
    "chat": bodies(st.fixed_dictionaries({"messages": MESSAGES}), ChatBody.__struct_fields__),
    "text": bodies(
        st.fixed_dictionaries({"prompt": st.text(max_size=9) | VALUES}), CompletionBody.__struct_fields__
    ),
    "gen": bodies(
        st.fixed_dictionaries(
            {
                "text": st.text(min_size=1, max_size=9),
                "sampling_params": st.dictionaries(
                    st.sampled_from(SglangSampling.__struct_fields__), VALUES, max_size=3
                ),
            }
        ),
        GenerateBody.__struct_fields__,
    ),
}


@pytest.fixture(scope="module")
def intakes(tmp_path_factory):
    found = tokenizer.load(save_tokenizer(tmp_path_factory.mktemp("model")))
    return {
        role: Intake(
            names=("tiny",),
            tokenizer=found,
            chat=ChatTemplate(found.templates),
            limits=ModelLimits(max_len=MAX_LEN, vocab_size=VOCAB, eos_ids=found.eos_ids),
            place=Place(role, "127.0.0.1", 1, ("x",)),
        )
        for role in Role
    }


@pytest.fixture(scope="module")
def loop():
    with asyncio.Runner() as runner:
        yield runner


@pytest.mark.parametrize("path", ["chat", "text", "gen"])
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_body_is_a_job_or_a_request_error(intakes, loop, path, data):
    intake = intakes[data.draw(st.sampled_from(list(Role)))]
    raw = json.dumps(data.draw(BODIES[path])).encode()
    made = {"chat": intake.chat_job, "text": intake.completion_job, "gen": intake.generate_job}[path]
    try:
        job, _ = loop.run(made(raw, {}))
    except RequestError as refused:
        event("refused")
        if refused.status in (400, 404) and refused.message:
            return
        raise
    event("accepted")
    s = job.sampling
    for value in (s.temperature, s.top_p, s.min_p, s.repetition_penalty, *s.logit_bias.values()):
        assert math.isfinite(value)
    assert 0 < s.top_p <= 1
    assert s.top_k >= 0
    assert 1 <= s.max_tokens <= MAX_LEN
    assert len(job.rids) == len(job.prompts) * job.n
    assert len(job.rooms) in (0, len(job.rids))
    assert all(0 <= seed < 2**64 for seed in job.seeds)
    for prompt in job.prompts:
        assert 0 < len(prompt.tokens) < MAX_LEN
        assert all(0 <= t < VOCAB for t in prompt.tokens)
    room = job.rooms[0] if job.rooms else None
    sent = wire.Generate("r", job.prompts[0].tokens, 1, s, job.half, room, job.priority)
    assert wire.decode(wire.decoder(wire.ToEngine), wire.encode(sent), "us") == sent


@settings(max_examples=100, deadline=None)
@given(raw=st.binary(max_size=60))
def test_any_bytes_are_a_request_error(intakes, loop, raw):
    with pytest.raises(RequestError):
        loop.run(intakes[Role.UNIFIED].chat_job(raw, {}))
