"""SGLang's and vLLM's protocols, as frames captured from sglang_router and vllm-router have them, against scripted engines."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from test_router_relay import Bench, bench, stream_error

from splitserve.errors import ConfigError
from splitserve.net.client import ClientResponse
from splitserve.router.dialects import dialect
from splitserve.router.dialects.sglang import num_sequences
from splitserve.router.dialects.vllm import prefill_body, splittable
from splitserve.router.fleet import LoadSnapshot
from splitserve.router.rewrite import prepare
from tests.fake_workers import (
    Behaviour,
    FakeWorker,
    Line,
    Seen,
    completes,
    dies,
    error,
    one_by_one,
    silent,
    streams,
    tokens,
    whole,
)
from tests.wire_http import go, until

ALL_TOKENS = b"".join(tokens(4))

# What vLLM 0.32's NixlConnector returned from a prefill (values shortened); decode must get it to the letter.
PARAMS = (
    '{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[1,2,3]],"remote_engine_id":"6f0c",'
    '"remote_request_id":"cmpl-1-0","remote_host":"127.0.0.1","remote_port":5600,"tp_size":1,"dcp_size":1,"pp_size":1,'
    '"remote_num_tokens":258,"remote_blocks_expiry_time":1e3,"transfer_mode":"pull"}'
)
ASKED = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def prefilled(params: str = PARAMS, *, after_s: float = 0.0) -> Behaviour:
    """A vLLM prefill: one token, and where its blocks are."""

    async def behave(seen: Seen, line: Line) -> None:
        await asyncio.sleep(after_s)
        body = (
            b'{"id":"cmpl-1","choices":[{"index":0,"text":" x"}],"kv_transfer_params": %s}' % params.encode()
        )
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
        await line.raw(head + body)

    return behave


def asked(worker: FakeWorker) -> list[Seen]:
    """What came from clients: the router's own questions are about "Hello"."""
    return [s for s in worker.seen if s.body.get("prompt") != "Hello"]


def streaming(**more: Any) -> dict[str, Any]:
    return {"model": "m", "prompt": "hi", "stream": True, **more}


# ---------------------------------------------------------------- vLLM


def test_vllm_prefill_comes_first_and_decode_gets_what_it_said() -> None:
    async def run() -> None:
        async with bench(prefilled(after_s=0.05), completes(), engine="vllm") as b:
            body = streaming(max_tokens=7, min_tokens=3, stream_options={"include_usage": True}, unknown=[1])
            answer = await b.ask(body, headers="authorization: Bearer k\r\nx-request-id: mine\r\n")
            assert answer.body == ALL_TOKENS
            (prefill,), (decode,) = asked(b.prefills[0]), asked(b.decodes[0])
            assert prefill.body == {
                "model": "m",
                "prompt": "hi",
                "stream": False,
                "max_tokens": 1,
                "min_tokens": 1,
                "unknown": [1],
                "kv_transfer_params": ASKED,
            }
            assert decode.raw.endswith(b'"kv_transfer_params":' + PARAMS.encode() + b"}")
            assert decode.body == {**body, "kv_transfer_params": json.loads(PARAMS)}
            assert prefill.at_s < decode.at_s
            want = (
                rf"___prefill_addr_127.0.0.1:{b.prefills[0].port}"
                rf"___decode_addr_127.0.0.1:{b.decodes[0].port}_[0-9a-f]{{32}}"
            )
            assert re.fullmatch(want, decode.headers["x-request-id"])
            assert prefill.headers["x-request-id"] == decode.headers["x-request-id"]
            assert decode.headers["authorization"] == "Bearer k"
            assert b.outcome("ok") == 1

    go(run())


@pytest.mark.parametrize(
    "more",
    [
        {"prompt": ["a", "b"]},
        {"prompt": [[1, 2], [3]]},
        {"prompt": "a", "n": 2},
        {"prompt": "a", "best_of": 2},
        {"prompt": "a", "prompt_logprobs": 1},
        {"prompt": "a", "echo": True, "logprobs": 1},
    ],
)
def test_vllm_what_one_set_of_blocks_cannot_describe_goes_to_decode_alone(more: dict[str, Any]) -> None:
    body = json.dumps({"model": "m", **more}).encode()
    assert not splittable(body)

    async def run() -> None:
        async with bench(prefilled(), completes(), engine="vllm") as b:
            assert (await b.ask({"model": "m", **more})).status == 200
            assert asked(b.prefills[0]) == []
            assert "kv_transfer_params" not in asked(b.decodes[0])[0].body

    go(run())


@pytest.mark.parametrize("prompt", ["one", ["one"], [1, 2, 3], [[1, 2]]])
def test_vllm_one_prompt_is_split_in_every_form(prompt: Any) -> None:
    assert splittable(json.dumps({"prompt": prompt, "n": 1, "logprobs": 3}).encode())


def test_vllm_a_chat_limit_is_lowered_in_both_its_names() -> None:
    body = {"messages": [], "max_completion_tokens": 9, "stream": True, "stream_options": {}}
    found = json.loads(prefill_body(json.dumps(body).encode()))
    assert (found["max_tokens"], found["max_completion_tokens"], found["stream"]) == (1, 1, False)
    assert "stream_options" not in found


def test_vllm_a_clients_own_transfer_fields_are_dropped() -> None:
    async def run() -> None:
        async with bench(prefilled(), completes(), engine="vllm") as b:
            await b.ask(streaming(kv_transfer_params={"remote_host": "evil"}))
            (prefill,), (decode,) = asked(b.prefills[0]), asked(b.decodes[0])
            assert prefill.body["kv_transfer_params"] == ASKED
            assert b"evil" not in decode.raw

    go(run())


def test_vllm_decode_computes_itself_what_prefill_did_not_keep() -> None:
    async def run() -> None:
        prefill = one_by_one(prefilled(), prefilled("null"))  # the first is the router's own probe
        async with bench(prefill, completes(), engine="vllm") as b:
            assert (await b.ask(streaming())).body == ALL_TOKENS
            assert asked(b.decodes[0])[0].body == streaming()

    go(run())


def test_vllm_a_pair_without_a_connector_is_never_ready() -> None:
    vllm = dialect("vllm")
    prepared = prepare(vllm.probe[1], seed=None)
    with pytest.raises(ConfigError, match="without kv_transfer_params") as caught:
        vllm.after_prefill(prepared, b'{"choices":[]}', must_cross=True)
    assert "--kv-transfer-config" in (caught.value.fix or "")


def test_vllm_a_refusal_of_prefill_is_the_answer_and_decode_is_never_asked() -> None:
    async def run() -> None:
        refused = {"error": {"message": "too long", "type": "BadRequestError", "param": None, "code": 400}}
        async with bench(one_by_one(prefilled(), whole(400, refused)), completes(), engine="vllm") as b:
            answer = await b.ask(streaming())
            assert answer.status == 400
            assert json.loads(answer.body) == refused
            assert asked(b.decodes[0]) == []

    go(run())


def test_vllm_a_lost_prefill_is_tried_again_from_the_start() -> None:
    async def run() -> None:
        prefill = one_by_one(prefilled(), dies(head=False), prefilled())
        async with bench(prefill, completes(), engine="vllm") as b:
            assert (await b.ask(streaming())).body == ALL_TOKENS
            assert [len(asked(w)) for w in (b.prefills[0], b.decodes[0])] == [2, 1]

    go(run())


def test_vllm_a_decode_that_fails_before_its_first_byte_starts_again_with_prefill() -> None:
    async def run() -> None:
        decode = one_by_one(completes(), error(500, "internal"), completes())
        async with bench(prefilled(), decode, engine="vllm") as b:
            assert (await b.ask(streaming())).body == ALL_TOKENS
            assert [len(asked(w)) for w in (b.prefills[0], b.decodes[0])] == [2, 2]

    go(run())


def test_vllm_decode_dying_in_the_middle_is_an_error_event() -> None:
    async def run() -> None:
        async with bench(prefilled(), one_by_one(completes(), dies(after=2)), engine="vllm") as b:
            assert stream_error(await b.ask(streaming()))["code"] == "peer_lost"

    go(run())


def test_vllm_a_client_that_leaves_during_prefill_closes_it_and_decode_is_never_asked() -> None:
    async def run() -> None:
        async with bench(one_by_one(prefilled(), silent()), completes(), engine="vllm") as b:
            asking = asyncio.create_task(b.ask(streaming()))
            await until(lambda: len(asked(b.prefills[0])) == 1, what="prefill asked")
            asking.cancel()
            await until(lambda: b.prefills[0].num_left == 1, what="prefill's connection closed")
            assert asked(b.decodes[0]) == []

    go(run())


def test_vllm_the_deadline_counts_prefill_too() -> None:
    async def run() -> None:
        slow = one_by_one(prefilled(), silent())
        async with bench(slow, completes(), engine="vllm", request_deadline_s=0.3) as b:
            answer = await b.ask(streaming())
            assert (answer.status, answer.json["error"]["code"]) == (503, "deadline_exceeded")

    go(run())


def test_vllm_has_no_generate() -> None:
    async def run() -> None:
        async with bench(prefilled(), completes(), engine="vllm") as b:
            answer = await b.ask({"text": "x"}, path="/generate")
            assert answer.status == 404
            assert "vllm has no /generate" in answer.json["error"]["message"]

    go(run())


def test_vllm_an_error_event_of_a_stream_says_by_its_number_whose_mistake_it_is() -> None:
    async def run() -> None:
        event = b'data: {"error": {"message": "bad regex", "type": "BadRequestError", "param": null, "code": 400}}\n\n'
        async with bench(prefilled(), one_by_one(completes(), streams([event])), engine="vllm") as b:
            answer = await b.ask(streaming())
            assert answer.status == 400
            assert b"bad regex" in answer.body
            assert len(asked(b.decodes[0])) == 1

    go(run())


METRICS = b"""# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:prompt_tokens_total{engine="0"} 100.0
vllm:prompt_tokens_by_source_total{engine="0",source="local_compute"} 30.0
vllm:prompt_tokens_by_source_total{engine="0",source="external_kv_transfer"} 70.0
vllm:prompt_tokens_by_source_created{engine="0",source="local_compute"} 1.79e+09
vllm:generation_tokens_total{engine="0"} 7
vllm:generation_tokens_total{engine="1"} 2.0
"""


def test_vllm_load_is_read_from_its_metrics() -> None:
    vllm = dialect("vllm")
    assert vllm.load(ClientResponse(200, {}, METRICS)) == LoadSnapshot(
        3, 2, 0, 750, 1000, prompt_tokens=30, output_tokens=9
    )
    older = b"vllm:prompt_tokens_total 100\nvllm:generation_tokens_total -1\n"
    assert vllm.load(ClientResponse(200, {}, older)) == LoadSnapshot(prompt_tokens=100)
    assert vllm.load(ClientResponse(200, {}, b"vllm:num_requests_running nonsense\n\xff")) == LoadSnapshot()
    assert vllm.load(ClientResponse(404, {}, b"")) == LoadSnapshot()


def test_vllm_load_from_what_a_real_one_printed() -> None:
    """vLLM 0.32.0's CPU build, decode of a pair; its histograms' buckets and times of creation are left out."""
    text = (Path(__file__).parents[1] / "fixtures/metrics/vllm-0.32.0-decode.txt").read_bytes()
    assert dialect("vllm").load(ClientResponse(200, {}, text)) == LoadSnapshot(
        free_pages=1000, total_pages=1000, prompt_tokens=1, output_tokens=121
    )


# ---------------------------------------------------------------- SGLang


def test_sglang_load_is_the_sum_over_its_ranks() -> None:
    entry = {"dp_rank": 0, "num_running_reqs": 2, "num_waiting_reqs": 1, "num_waiting_uncached_tokens": 70}
    entry |= {"num_used_tokens": 100, "max_total_num_tokens": 400, "token_usage": 0.25}
    entry |= {"total_prefill_uncached_tokens": 5000, "gen_throughput": 12.5}
    body = json.dumps({"version": "0.5.23", "loads": [entry, entry]}).encode()
    sglang = dialect("sglang")
    assert sglang.load(ClientResponse(200, {}, body)) == LoadSnapshot(
        4, 2, 140, 600, 800, prompt_tokens=10000, output_per_s=25.0
    )
    for wrong in (b"", b"[]", b'{"loads":[{"num_running_reqs":"x"}]}'):
        assert sglang.load(ClientResponse(200, {}, wrong)) == LoadSnapshot()


def test_sglang_both_halves_get_the_same_room_at_once_and_no_seed_is_added() -> None:
    async def run() -> None:
        async with bench(whole(200, {"text": "x"}), completes(), engine="sglang") as b:
            body = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "stream": True}
            assert (await b.ask(body, path="/v1/chat/completions")).body == ALL_TOKENS
            (prefill,), (decode,) = b.prefills[0].seen, b.decodes[0].seen
            assert prefill.raw == decode.raw
            assert decode.body.pop("bootstrap_room") > 0
            sent = {k: v for k, v in decode.body.items() if k != "bootstrap_room"}
            assert sent == {**body, "bootstrap_host": "127.0.0.1", "bootstrap_port": 8998}

    go(run())


@pytest.mark.parametrize(
    ("body", "count"),
    [
        ({"prompt": "a"}, None),
        ({"prompt": [1, 2, 3]}, None),
        ({"prompt": ["a"]}, 1),
        ({"prompt": ["a", "b", "c"]}, 3),
        ({"prompt": [[1], [2]]}, 2),
        ({"prompt": ["a", "b"], "n": 3}, 6),
        ({"messages": [], "n": 2}, 2),
        ({"messages": [], "n": 1}, None),
        ({"input_ids": [[1], [2]]}, 2),
        ({"text": "a", "sampling_params": {"n": 4}}, 4),
        ({"prompt": "a", "n": "two"}, None),
        ({"prompt": [], "n": None}, None),
    ],
)
def test_sglang_as_many_rooms_as_sequences(body: dict[str, Any], count: int | None) -> None:
    assert num_sequences(json.dumps(body).encode()) == count


def test_sglang_a_batch_has_lists_of_rooms() -> None:
    async def run() -> None:
        async with bench(whole(200, {"text": "x"}), completes(), engine="sglang") as b:
            await b.ask({"model": "m", "prompt": ["a", "b"]})
            sent = b.decodes[0].seen[0].body
            assert sent["bootstrap_host"] == ["127.0.0.1"] * 2
            assert sent["bootstrap_port"] == [8998] * 2
            first, second = sent["bootstrap_room"]
            assert second == first + 1

    go(run())


def test_sglang_a_failing_prefill_closes_decode_and_both_try_again_in_a_new_room() -> None:
    async def run() -> None:
        prefill = one_by_one(error(500, "internal", after_s=0.05), whole(200, {"text": "x"}))
        decode = one_by_one(silent(head=True), completes())
        async with bench(prefill, decode, engine="sglang") as b:
            assert (await b.ask(streaming())).body == ALL_TOKENS
            rooms = [s.body["bootstrap_room"] for s in b.decodes[0].seen]
            assert len(set(rooms)) == 2
            assert b.decodes[0].num_left == 1

    go(run())


def test_sglang_a_lost_prefill_leaves_decode_no_grace() -> None:
    """Its decode would wait 300 s for a state that nobody sends."""

    async def run() -> None:
        prefill = one_by_one(dies(head=False, after_s=0.15), dies(head=False, after_s=0.15), whole(200, {}))
        decode = one_by_one(silent(head=True), silent(head=True), completes())
        async with bench(prefill, decode, engine="sglang", prefill_grace_s=30.0) as b:
            assert (await b.ask(streaming())).body == ALL_TOKENS
            assert b.decodes[0].num_left == 2

    go(run())


def test_sglang_prefills_answer_is_read_to_its_end() -> None:
    async def run() -> None:
        late = whole(200, {"text": "x"}, after_s=0.1)
        async with bench(late, completes(), engine="sglang") as b:
            assert (await b.ask(streaming())).body == ALL_TOKENS
            await asyncio.sleep(0.2)
            assert b.prefills[0].num_left == 0

    go(run())


def test_sglang_prompt_logprobs_of_prefill_join_decodes_answer() -> None:
    async def run() -> None:
        prefill = whole(200, {"text": "x", "meta_info": {"input_token_logprobs": [[None, 1], [-0.5, 2]]}})
        decode = whole(200, {"text": "y", "meta_info": {"completion_tokens": 1}})
        async with bench(prefill, decode, engine="sglang") as b:
            answer = await b.ask({"text": "a", "return_logprob": True}, path="/generate")
            assert answer.json["meta_info"]["input_token_logprobs"] == [[None, 1], [-0.5, 2]]

    go(run())


def test_every_dialect_has_a_probe_that_its_own_paths_take() -> None:
    for name in ("splitserve", "sglang", "vllm"):
        path, body = dialect(name).probe
        assert path in dialect(name).paths
        assert msgspec.json.decode(body)
        assert dialect(name).name == name


def test_what_waits_is_cut_when_the_router_stops() -> None:
    async def run() -> None:
        async with bench(one_by_one(prefilled(), silent()), completes(), engine="vllm") as b:
            asking = asyncio.create_task(b.ask(streaming()))
            await until(lambda: len(asked(b.prefills[0])) == 1, what="prefill asked")
            await _stopped(b)
            assert (await asking).status == 503

    go(run())


async def _stopped(b: Bench) -> None:
    await b.router.proxy.close()
