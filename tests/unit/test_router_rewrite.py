"""Bodies: what reaches the engines is what the client wrote, plus our fields, whatever JSON it was."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitserve.errors import RequestError
from splitserve.router.rewrite import merge_input_logprobs, prepare

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.text() | st.sampled_from(
    ["stream", "seed", "prompt", "bootstrap_room", "bootstrap_host", "n", "\u0073eed"]
)
BODIES = st.dictionaries(NAMES, VALUES, max_size=6)
OURS = {"bootstrap_host", "bootstrap_port", "bootstrap_room"}


@settings(max_examples=120, deadline=None)
@given(
    body=BODIES,
    ascii_only=st.booleans(),
    indent=st.sampled_from([None, 0, 2]),
    pad=st.sampled_from(["", " \n\t"]),
)
def test_json_in_is_json_out(body: dict[str, object], ascii_only: bool, indent: int | None, pad: str) -> None:
    raw = (pad + json.dumps(body, ensure_ascii=ascii_only, indent=indent) + pad).encode()
    prepared = prepare(raw, seed=99)
    theirs = {k: v for k, v in body.items() if k not in OURS}
    if theirs.get("seed") is None:
        theirs["seed"] = 99
    plain = prepared.plain()
    assert json.loads(plain) == theirs
    split = json.loads(prepared.with_room('h"o', 8998, 5))
    assert split == {**theirs, "bootstrap_host": 'h"o', "bootstrap_port": 8998, "bootstrap_room": 5}
    for raw_out in (plain, prepared.with_room("h", None, 5)):
        names = [k for k, _ in json.loads(raw_out, object_pairs_hook=lambda pairs: pairs)]
        for name in {*OURS, "seed"}:
            assert names.count(name) <= 1, f"{name} stands there twice"
    assert prepared.stream is (body.get("stream") is True)


def test_numbers_keep_their_text() -> None:
    raw = b'{"a":1e400,"b":123456789012345678901234567890,"c":1.10}'
    assert prepare(raw, seed=None).plain() == raw


def test_no_seed_where_none_is_wanted() -> None:
    assert prepare(b'{"a":1}', seed=None).plain() == b'{"a":1}'
    assert (
        prepare(b"{}", seed=None).with_room("h", 1, 2)
        == b'{"bootstrap_host":"h","bootstrap_port":1,"bootstrap_room":2}'
    )


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"}",
        b"[]",
        b"1",
        b'"x"',
        b"null",
        b'{"a":1}}',
        b'{"a":1} x',
        b"{'a':1}",
        b'{"a":NaN}',
        b'{"a"}',
        b'{"a":"\xff"}',
        b'{"\xff":1,"seed":null}',
    ],
)
def test_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(RequestError, match="no JSON object") as refused:
        prepare(body, seed=None)
    assert "one JSON object" in refused.value.to_dict()["fix"]


def test_depth_is_bounded_without_a_crash() -> None:
    with pytest.raises(RequestError):
        prepare(b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}", seed=1)


@pytest.mark.parametrize(
    ("body", "prompt"),
    [
        (b'{"prompt":"hi"}', b'"hi"'),
        (b'{"messages":[{"role":"user"}]}', b'[{"role":"user"}]'),
        (b'{"text":["a","b"]}', b'["a","b"]'),
        (b'{"input_ids":[1,2]}', b"[1,2]"),
        (b'{"model":"m"}', b""),
    ],
)
def test_prompt_text(body: bytes, prompt: bytes) -> None:
    assert prepare(body, seed=None, read_prompt=True).prompt_text == prompt


def meta(**fields: object) -> bytes:
    return json.dumps({"text": "x", "meta_info": fields}).encode()


def test_input_logprobs_are_added_only_where_they_are_missing() -> None:
    prefill = meta(input_token_logprobs=[[-1, 2, None]], input_top_logprobs=[[1]])
    assert json.loads(merge_input_logprobs(meta(id="r"), prefill))["meta_info"] == {
        "id": "r",
        "input_token_logprobs": [[-1, 2, None]],
        "input_top_logprobs": [[1]],
    }
    complete = meta(input_token_logprobs=[[-5, 2, None]])
    assert json.loads(merge_input_logprobs(complete, prefill))["meta_info"]["input_token_logprobs"] == [
        [-5, 2, None]
    ]
    batch = b"[" + meta() + b"," + meta() + b"]"
    both = json.loads(merge_input_logprobs(batch, b"[" + prefill + b"," + meta() + b"]"))
    assert [bool(a["meta_info"]) for a in both] == [True, False]


@pytest.mark.parametrize("other", [b"", b"no json", b"[]", b"{}", b'{"meta_info":3}', b"7"])
def test_an_answer_is_untouched_when_there_is_nothing_to_add(other: bytes) -> None:
    answer = meta(id="r", weird=1.10)
    assert merge_input_logprobs(answer, other) is answer
