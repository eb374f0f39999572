"""The whole server but the engine, over real sockets: httptools server, ZeroMQ line, the official client, SSE bytes."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest

from splitserve import wire
from splitserve.errors import EngineLost, Overloaded
from splitserve.net import http
from splitserve.server.access import Access
from splitserve.server.app import App
from splitserve.server.engine_link import EngineLink, engine_lost
from splitserve.server.health import Health
from splitserve.server.intake import Intake
from splitserve.server.params import ModelLimits
from splitserve.server.rooms import Place
from splitserve.server.service import Service, Settings
from splitserve.text import tokenizer
from splitserve.text.chat import ChatTemplate
from splitserve.types import FinishReason, Role, TokenEvent
from tests.fake_engine import END, VOCAB, FakeEngine, logprobs_of, save_tokenizer, say

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
MEET = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 9000, "bootstrap_room": 77}
KEY = "sesame"


@dataclass
class Bench:
    """One server with a scripted engine, and ways to talk to it."""

    port: int
    engine: FakeEngine
    service: Service
    client: openai.AsyncOpenAI

    async def call(
        self, method: str, path: str, body=None, headers: str = ""
    ) -> tuple[int, dict[str, str], bytes]:
        """One request over a connection of its own."""
        reader, writer = await self.send(method, path, body, headers)
        raw = await asyncio.wait_for(reader.read(), 10)
        writer.close()
        head, _, rest = raw.partition(b"\r\n\r\n")
        lines = head.decode().split("\r\n")
        found = {k.lower(): v for k, v in (line.split(": ", 1) for line in lines[1:])}
        if found.get("transfer-encoding") == "chunked":
            rest = dechunk(rest)
        return int(lines[0].split()[1]), found, rest

    async def send(self, method: str, path: str, body=None, headers: str = ""):
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        lines = f"host: x\r\nconnection: close\r\ncontent-length: {len(raw)}\r\n{headers}"
        writer.write(f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode() + raw)
        return reader, writer

    async def json(self, method: str, path: str, body=None) -> dict:
        status, _, raw = await self.call(method, path, body)
        assert status == 200, raw
        return json.loads(raw)

    async def events(self, path: str, body: dict) -> list[dict]:
        status, head, raw = await self.call("POST", path, {**body, "stream": True})
        assert (status, head["content-type"], head["transfer-encoding"]) == (
            200,
            "text/event-stream",
            "chunked",
        )
        lines = [x.removeprefix("data: ") for x in raw.decode().split("\n\n") if x]
        assert lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]]

    async def until(self, condition: Callable[[], bool], *, within_s: float = 5.0) -> None:
        async with asyncio.timeout(within_s):
            while not condition():
                await asyncio.sleep(0.002)

    async def quiet(self) -> None:
        """Nothing is left of any request, in the server or in the engine."""
        await self.until(
            lambda: not self.service.runs and not self.service.link.num_open and not self.engine.open
        )


def dechunk(raw: bytes) -> bytes:
    out = b""
    while raw:
        size, _, raw = raw.partition(b"\r\n")
        length = int(size, 16)
        out, raw = out + raw[:length], raw[length + 2 :]
        if not length:
            return out
    raise AssertionError("the chunked body is cut")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture
def bench(model_dir, tmp_path):
    """Run a coroutine function against a fresh server: bench(script, body, **settings)."""

    @asynccontextmanager
    async def opened(
        script, *, role=Role.UNIFIED, keys: str = "", stall_s=30.0, **settings
    ) -> AsyncIterator[Bench]:
        link = EngineLink(f"ipc://{tmp_path}/e")
        engine = FakeEngine(link.endpoint, script).start()
        service = Service(
            link,
            Settings(**{"max_requests": 8, "deadline_s": 20.0, "about": {"model_path": "/m"}} | settings),
            health=Health(link, stall_s=stall_s),
        )
        app = App(service, Access(keys))
        hello = await asyncio.wait_for(link.greeting(), 5)
        found = tokenizer.load(model_dir)
        service.intake = Intake(
            names=("tiny",),
            tokenizer=found,
            chat=ChatTemplate(found.templates),
            limits=ModelLimits(hello.max_len, VOCAB, found.eos_ids),
            place=Place(role, "127.0.0.1", 8998, ("127.0.0.1",)),
        )
        listener = await http.serve(app, host="127.0.0.1", port=0, limits=http.Limits(max_body_bytes=1 << 20))
        watch = asyncio.create_task(service.health.watch())
        client = openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{listener.port}/v1", api_key=KEY, max_retries=0
        )
        try:
            yield Bench(listener.port, engine, service, client)
        finally:
            await client.close()
            watch.cancel()
            await listener.close()
            engine.stop()
            link.close()

    def run(script, body: Callable[[Bench], Awaitable[None]], **settings) -> None:
        async def whole() -> None:
            async with opened(script, **settings) as made:
                await body(made)

        asyncio.run(asyncio.wait_for(whole(), 30))

    return run


# ------------------------------------------------------------------ the official client


def test_chat_and_usage(bench):
    async def body(b: Bench) -> None:
        got = await b.client.chat.completions.create(**CHAT, seed=5, max_completion_tokens=50)
        assert got.choices[0].message.content == "Hello 😀"
        assert got.choices[0].finish_reason == "stop"
        assert (got.usage.prompt_tokens, got.usage.completion_tokens) == (4, 11)
        assert got.usage.prompt_tokens_details.cached_tokens == 3
        sent = b.engine.generates[0]
        assert sent.tokens == [258, *b"Hi", 259]
        assert (sent.num_prompt, sent.sampling.seed, sent.sampling.stop_token_ids) == (4, 5, (END,))
        await b.quiet()
        assert b.engine.aborts == []

    bench(say("Hello 😀"), body)


def test_chat_stream(bench):
    async def body(b: Bench) -> None:
        stream = await b.client.chat.completions.create(
            **CHAT, stream=True, stream_options={"include_usage": True}, max_tokens=9
        )
        chunks = [c async for c in stream]
        deltas = [c.choices[0].delta for c in chunks if c.choices]
        assert deltas[0].role == "assistant"
        assert [d.content for d in deltas[:3]] == ["H", "é", "y"]
        assert "".join(d.content or "" for d in deltas) == "Héy 😀"
        assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
        assert chunks[-1].usage.completion_tokens == 9
        assert all(c.usage is None for c in chunks[:-1])
        assert len({c.id for c in chunks}) == 1

    bench(say("Héy 😀..."), body)


def test_completions_echo_logprobs_and_lists(bench):
    async def body(b: Bench) -> None:
        got = await b.client.completions.create(
            model="tiny", prompt=["ab", "é"], n=2, echo=True, logprobs=2, max_tokens=2
        )
        assert [c.text for c in got.choices] == ["abxy", "abxy", "éxy", "éxy"]
        assert [c.index for c in got.choices] == [0, 1, 2, 3]
        found = got.choices[0].logprobs
        assert found.tokens == ["a", "b", "x", "y"]
        assert found.token_logprobs == [None, -0.98, -1.2, -1.21]
        assert found.text_offset == [0, 1, 2, 3]
        assert found.top_logprobs[2] == {"x": -1.2, "y": -2.2}
        assert got.usage.prompt_tokens == 4
        assert got.usage.completion_tokens == 8
        assert sorted(g.sampling.choice for g in b.engine.generates) == [0, 0, 1, 1]

    bench(say("xyz"), body)


def test_scoring_a_prompt_without_output(bench):
    async def body(b: Bench) -> None:
        got = await b.client.completions.create(
            model="tiny", prompt="abc", echo=True, logprobs=0, max_tokens=0
        )
        assert got.choices[0].text == "abc"
        assert got.choices[0].logprobs.token_logprobs == [None, -0.98, -0.99]
        assert got.usage.completion_tokens == 0

    bench(say("x"), body)


def test_chat_logprobs_streamed_and_whole_are_alike(bench):
    async def body(b: Bench) -> None:
        args = {**CHAT, "logprobs": True, "top_logprobs": 1}
        whole = await b.client.chat.completions.create(**args)
        stream = await b.client.chat.completions.create(**args, stream=True)
        entries = [e async for c in stream for e in (c.choices[0].logprobs.content if c.choices else [])]
        assert entries == whole.choices[0].logprobs.content
        assert [e.bytes for e in entries] == [[65], [0xC3], [0xA9]]  # the end token is not shown
        assert entries[0].top_logprobs[0].token == "A"
        assert entries[0].logprob == logprobs_of(65, 0).logprob

    bench(say("Aé"), body)


def test_stop_string_ends_the_engines_work_and_is_not_leaked(bench):
    async def body(b: Bench) -> None:
        stream = await b.client.chat.completions.create(**CHAT, stream=True, stop=["##"], logprobs=True)
        chunks = [c async for c in stream]
        texts = [c.choices[0].delta.content or "" for c in chunks]
        assert "".join(texts) == "ab#c"
        assert chunks[-1].choices[0].finish_reason == "stop"
        assert "".join(e.token for c in chunks for e in c.choices[0].logprobs.content) == "ab#c"
        await b.quiet()
        assert [a.reason for a in b.engine.aborts] == ["stop string"]

    bench(say("ab#c##" + "z" * 400), body)


def test_n_choices_stream_interleaved(bench):
    async def body(b: Bench) -> None:
        stream = await b.client.chat.completions.create(**CHAT, stream=True, n=3, seed=1)
        texts = ["", "", ""]
        async for chunk in stream:
            texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        assert texts == ["Hey"] * 3
        assert {(g.sampling.choice, g.sampling.seed) for g in b.engine.generates} == {(0, 1), (1, 1), (2, 1)}

    bench(say("Hey"), body)


# ------------------------------------------------------------------ /generate


def test_generate_streams_cumulative_text(bench):
    async def body(b: Bench) -> None:
        events = await b.events(
            "/generate", {"text": "q", "rid": "me", "sampling_params": {"max_new_tokens": 3}}
        )
        assert [e["text"] for e in events][-1] == "abc"
        assert all("abc".startswith(e["text"]) for e in events)
        assert [e["output_ids"] for e in events] == [list(e["text"].encode()) for e in events]
        assert events[-1]["output_ids"] == list(b"abc")
        meta = events[-1]["meta_info"]
        assert (meta["id"], meta["prompt_tokens"], meta["completion_tokens"]) == ("me", 1, 3)
        assert meta["finish_reason"] == {"type": "length", "length": 3}
        assert all(e["meta_info"]["finish_reason"] is None for e in events[:-1])

    bench(say("abcdef"), body)


def test_generate_logprobs_and_lists(bench):
    async def body(b: Bench) -> None:
        ask = {
            "input_ids": [[1, 2, 3]],
            "return_logprob": True,
            "logprob_start_len": 1,
            "top_logprobs_num": 1,
        }
        (got,) = await b.json("POST", "/generate", {**ask, "return_text_in_logprobs": True})
        meta = got["meta_info"]
        assert meta["input_token_logprobs"] == [[-0.02, 2, "\x02"], [-0.03, 3, "\x03"]]
        assert meta["output_token_logprobs"] == [[-0.97, 97, "a"], [-2.56, END, "<|end|>"]]
        assert meta["output_top_logprobs"][0] == [[-0.97, 97, "a"]]
        assert meta["finish_reason"] == {"type": "stop", "matched": END}
        assert isinstance(await b.json("POST", "/generate", {"text": "x"}), dict)

    bench(say("a"), body)


def test_decode_leaves_prompt_logprobs_to_a_foreign_router(bench):
    """sglang_router puts prefill's in front of decode's; ours passes decode's bytes on."""

    async def body(b: Bench) -> None:
        ask = {"text": "xy", "return_logprob": True, "logprob_start_len": 0, **MEET}
        got = await b.json("POST", "/generate", ask)
        assert got["meta_info"]["input_token_logprobs"] == []
        _, _, raw = await b.call("POST", "/generate", ask, "x-splitserve-router: 1\r\n")
        assert len(json.loads(raw)["meta_info"]["input_token_logprobs"]) == 2

    bench(say("a"), body, role=Role.DECODE)


# ------------------------------------------------------------------ halves


def test_streams_send_their_head_before_any_token(bench):
    async def body(b: Bench) -> None:
        b.engine.gate.clear()
        reader, writer = await b.send("POST", "/v1/chat/completions", {**CHAT, **MEET, "stream": True})
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 2)
        assert head.startswith(b"HTTP/1.1 200")
        await b.until(lambda: len(b.engine.generates) == 1)
        assert b.engine.generates[0].half == "decode"
        assert b.engine.generates[0].room == wire.Room(77, "127.0.0.1", 9000)
        b.engine.gate.set()
        assert b"[DONE]" in await asyncio.wait_for(reader.read(), 5)
        writer.close()

    bench(say("ok"), body, role=Role.DECODE)


def test_prefill_answers_when_its_handoff_is_done(bench):
    async def body(b: Bench) -> None:
        b.engine.gate.clear()
        task = asyncio.create_task(b.json("POST", "/v1/chat/completions", {**CHAT, **MEET, "stop": "a"}))
        await b.until(lambda: len(b.engine.generates) == 1)
        assert (b.engine.generates[0].half, b.engine.generates[0].sampling.max_tokens) == ("prefill", 508)
        assert not task.done()
        b.engine.gate.set()
        got = await asyncio.wait_for(task, 5)
        assert got["usage"]["completion_tokens"] == 1
        await b.quiet()
        assert b.engine.aborts == []  # a stop string in the first token must not take the handoff back

    bench(say("abc"), body, role=Role.PREFILL)


# ------------------------------------------------------------------ clients that leave, engines that die


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_aborts_its_request_at_once(bench, stream):
    async def body(b: Bench) -> None:
        _, writer = await b.send("POST", "/v1/chat/completions", {**CHAT, "n": 2, "stream": stream})
        await b.until(lambda: len(b.engine.generates) == 2)
        left = asyncio.get_running_loop().time()
        writer.transport.abort()
        await b.until(lambda: len(b.engine.aborts) == 2)
        assert asyncio.get_running_loop().time() - left < 0.5
        assert {a.reason for a in b.engine.aborts} == {"client left"}
        await b.quiet()
        assert b'status="client_left"} 1.0' in (await b.call("GET", "/metrics"))[2]

    bench(say("x" * 400, end=False), body) if stream else bench(lambda _: [], body)


def test_prefill_that_answers_first_goes_on_until_its_handoff_is_done(bench):
    """vllm-router's order: the answer comes with the first token, and answering does not end the request."""

    async def body(b: Bench) -> None:
        ask = {"prompt": "Hi", "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
        answer = await asyncio.wait_for(b.json("POST", "/v1/completions", ask), 3)
        asked, told = b.engine.generates[0], answer["kv_transfer_params"]
        assert told["bootstrap_room"] == asked.room.id
        assert (told["bootstrap_host"], told["bootstrap_port"]) == ("127.0.0.1", 8998)
        assert len(b.service.runs) == 1
        b.engine.outbox.append(wire.Outputs((TokenEvent(asked.rid, finish=FinishReason.LENGTH),)))
        await b.until(lambda: not b.service.runs)
        assert b.engine.aborts == []

    bench(lambda request: [TokenEvent(request.rid, tokens=(65,))], body, role=Role.PREFILL)


def test_openapi_describes_every_path_and_field(bench):
    async def body(b: Bench) -> None:
        found = await b.json("GET", "/openapi.json")
        assert {"/generate", "/v1/chat/completions", "/v1/models", "/openapi.json"} <= set(found["paths"])
        chat = found["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]
        name = chat["schema"]["$ref"].rpartition("/")[2]
        fields = found["components"]["schemas"][name]["properties"]
        assert {"messages", "temperature", "kv_transfer_params", "bootstrap_room"} <= set(fields)
        refs = re.findall(r'"#/components/schemas/(\w+)"', json.dumps(found))
        assert set(refs) <= set(found["components"]["schemas"])
        assert "max_new_tokens" in found["components"]["schemas"]["SglangSampling"]["properties"]

    bench(say("a"), body)


def test_a_client_that_leaves_while_another_stays(bench):
    async def body(b: Bench) -> None:
        b.engine.gate.clear()
        stay = asyncio.create_task(b.json("POST", "/v1/chat/completions", CHAT))
        await b.until(lambda: len(b.engine.generates) == 1)
        _, writer = await b.send("POST", "/generate", {"text": "x"})
        await b.until(lambda: len(b.engine.generates) == 2)
        writer.transport.abort()
        await b.until(lambda: len(b.engine.aborts) == 1)
        b.engine.gate.set()
        assert (await stay)["choices"][0]["message"]["content"] == "ok"

    bench(say("ok"), body)


def test_engine_death_fails_every_request_at_once(bench):
    async def body(b: Bench) -> None:
        b.engine.gate.clear()
        whole = asyncio.create_task(b.call("POST", "/v1/completions", {"prompt": "a"}))
        streamed = asyncio.create_task(b.events("/v1/completions", {"prompt": "a"}))
        control = asyncio.create_task(b.call("GET", "/debug/stats"))
        await b.until(lambda: len(b.engine.generates) == 2 and len(b.engine.controls) >= 1)
        b.service.link.fail(engine_lost("rank 0 was killed by signal 9"))
        status, _, raw = await asyncio.wait_for(whole, 1)
        assert (status, json.loads(raw)["error"]["code"]) == (502, "engine_lost")
        (last,) = (await asyncio.wait_for(streamed, 1))[-1:]
        assert last["error"]["code"] == "engine_lost"
        await control
        for path in ("/ready", "/health", "/v1/models"):
            assert (await b.call("GET", path))[0] == 502
        assert (await b.call("POST", "/generate", {"text": "x"}))[0] == 502

    bench(say("ok"), body)


def test_an_engine_that_has_closed_its_line_is_lost_before_its_process_is_reaped(bench):
    async def body(b: Bench) -> None:
        task = asyncio.create_task(b.call("POST", "/generate", {"text": "x"}))
        await b.until(lambda: len(b.engine.generates) == 1)
        await asyncio.to_thread(b.engine.stop)
        with pytest.raises(EngineLost, match="closed its line"):
            await asyncio.wait_for(asked_until_lost(b.service.link), 5)
        assert (await b.call("POST", "/generate", {"text": "y"}))[0] == 502
        await b.json("POST", "/abort_request", {"abort_all": True})
        assert (await task)[0] == 200
        await b.until(lambda: not b.service.runs and not b.service.link.num_open)

    bench(lambda _: [], body)


async def asked_until_lost(link: EngineLink) -> None:
    while True:  # ZeroMQ notices within moments
        with suppress(Overloaded):
            await link.control("stats", timeout_s=0.1)


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("transfer_failed", 503),
        ("overloaded", 503),
        ("deadline_exceeded", 503),
        ("peer_lost", 502),
        ("invalid_request", 400),
    ],
)
def test_errors_of_the_engine_keep_code_and_status(bench, code, status):
    def script(request: wire.Generate):
        return [wire.Failed(request.rid, code, status, f"because of {code}", 3.0)]

    async def body(b: Bench) -> None:
        got, head, raw = await b.call("POST", "/v1/completions", {"prompt": "a"})
        error = json.loads(raw)["error"]
        assert (got, error["code"], error["message"]) == (status, code, f"because of {code}")
        assert head.get("retry-after") == ("3" if code == "overloaded" else None)
        (last,) = await b.events("/generate", {"text": "a"})
        assert last["error"]["code"] == code
        await b.quiet()
        figures = (await b.call("GET", "/metrics"))[2].decode()
        assert f'{{endpoint="completions",status="{status}"}} 1.0' in figures
        assert f'{{endpoint="generate",status="error:{code}"}} 1.0' in figures

    bench(script, body)


def test_one_failed_choice_ends_all_of_them(bench):
    def script(request: wire.Generate):
        if request.sampling.choice == 1:
            return [wire.Failed(request.rid, "transfer_failed", 503, "no")]
        return say("x" * 100, end=False)(request)[:50]

    async def body(b: Bench) -> None:
        status, _, _ = await b.call("POST", "/v1/chat/completions", {**CHAT, "n": 3})
        assert status == 503
        await b.quiet()
        assert len(b.engine.aborts) == 2

    bench(script, body)


def test_the_servers_own_deadline_when_the_engine_says_nothing(bench):
    async def body(b: Bench) -> None:
        status, _, raw = await b.call("POST", "/v1/completions", {"prompt": "a"})
        assert (status, json.loads(raw)["error"]["code"]) == (503, "deadline_exceeded")
        await b.quiet()
        assert len(b.engine.aborts) == 1

    bench(lambda _: [], body, deadline_s=-1.9)  # 2 s of grace are added


# ------------------------------------------------------------------ limits and access


def test_bad_requests_are_answered_as_errors(bench):
    async def body(b: Bench) -> None:
        for method, path, given, status, code in [
            ("POST", "/v1/chat/completions", b"{", 400, "invalid_request"),
            ("POST", "/v1/chat/completions", {**CHAT, "n": "x"}, 400, "invalid_request"),
            ("POST", "/v1/chat/completions", {**CHAT, "model": "other"}, 404, "model_not_found"),
            ("POST", "/v1/completions", {"prompt": ""}, 400, "invalid_request"),
            ("GET", "/v1/chat/completions", None, 404, "not_found"),
            ("POST", "/nowhere", {}, 404, "not_found"),
            ("POST", "/debug/plant", {"fault": "x"}, 404, "not_found"),
            ("POST", "/tokenize", {"prompt": 5}, 400, "invalid_request"),
            ("POST", "/abort_request", {}, 400, "invalid_request"),
            ("POST", "/detokenize", {"tokens": [10**6]}, 400, "invalid_request"),
            ("POST", "/generate", b" " * (2 << 20), 413, "body_too_large"),
        ]:
            got, _, raw = await b.call(method, path, given)
            error = json.loads(raw)["error"]
            assert (got, error["code"]) == (status, code), (path, error)
            assert error["type"] == "invalid_request_error"
            assert set(error) >= {"message", "type", "param", "code"}
        with pytest.raises(openai.BadRequestError, match="temperature"):
            await b.client.chat.completions.create(**CHAT, temperature=-1)
        with pytest.raises(openai.NotFoundError):
            await b.client.chat.completions.create(**{**CHAT, "model": "other"})
        assert b.engine.generates == []

    bench(say("x"), body)


def test_too_many_requests_are_turned_away_with_retry_after(bench):
    async def body(b: Bench) -> None:
        waiting = [asyncio.create_task(b.call("POST", "/generate", {"text": "x"})) for _ in range(2)]
        await b.until(lambda: len(b.engine.generates) == 2)
        status, head, raw = await b.call("POST", "/generate", {"text": "x"})
        assert (status, head["retry-after"]) == (503, "1")
        assert "2 requests are open" in json.loads(raw)["error"]["message"]
        await b.json("POST", "/abort_request", {"abort_all": True})
        for status, _, raw in await asyncio.gather(*waiting):
            assert (status, json.loads(raw)["meta_info"]["finish_reason"]["type"]) == (200, "abort")

    bench(lambda _: [], body, max_requests=2)


def test_requests_that_do_not_end_by_themselves_are_logged_under_the_id_of_their_answer(bench, caplog):
    async def body(b: Bench) -> None:
        ids = [(await b.json("POST", "/v1/completions", {"prompt": "x"}))["id"]]
        b.engine.gate.clear()
        one = asyncio.create_task(b.json("POST", "/v1/completions", {"prompt": "x", "rid": "one"}))
        await b.until(lambda: len(b.engine.generates) == 2)
        await b.json("POST", "/abort_request", {"rid": "one"})
        ids.append((await one)["id"])
        for more in ({}, {"rid": "three"}):
            _, writer = await b.send(
                "POST", "/v1/completions", {"prompt": "x", **more}, "x-request-id: two\r\n"
            )
            await b.until(lambda: len(b.engine.generates) == 3 + len(more))
            writer.transport.abort()
            await b.quiet()
        await b.json("POST", "/abort_request", {"rid": "four"})  # as at prefill, when its part has ended
        lines = [r for r in caplog.records if r.name.endswith("generation")]
        assert [(r.levelname, r.getMessage().rpartition(",")[0]) for r in lines] == [
            ("DEBUG", f"request {ids[0]} (completions): 200, 5 tokens of output"),
            ("INFO", f"request {ids[1]} (completions): 200, aborted, 0 tokens of output"),
            ("INFO", "request two (completions): client_left, 0 tokens of output"),
            ("INFO", "request three [X-Request-Id two] (completions): client_left, 0 tokens of output"),
        ]
        told = [r.getMessage() for r in caplog.records if r.name.endswith("operator")]
        assert told == ["abort of one: ended 1 here", "abort of four: ended 0 here"]

    with caplog.at_level("DEBUG", logger="splitserve.server"):
        bench(say("fine"), body)


def test_abort_by_rid_ends_only_that_request(bench):
    async def body(b: Bench) -> None:
        b.engine.gate.clear()
        one = asyncio.create_task(b.json("POST", "/generate", {"text": "x", "rid": "one"}))
        two = asyncio.create_task(b.json("POST", "/generate", {"text": "x", "rid": "two"}))
        await b.until(lambda: len(b.engine.generates) == 2)
        assert await b.json("POST", "/abort_request", {"rid": "one"}) == {"aborted": 1}
        assert (await one)["meta_info"]["finish_reason"]["type"] == "abort"
        b.engine.gate.set()
        assert (await two)["text"] == "fine"

    bench(say("fine"), body)


def test_api_key(bench, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text(f"# people\nother\n{KEY}\n")

    async def body(b: Bench) -> None:
        for header in ("", "authorization: Bearer wrong\r\n", f"authorization: Basic {KEY}\r\n"):
            status, _, raw = await b.call("GET", "/v1/models", headers=header)
            assert (status, json.loads(raw)["error"]["code"]) == (401, "unauthorized")
        assert (await b.call("GET", "/health"))[0] == 200
        assert (await b.call("GET", "/ready"))[0] == 503
        assert [m.id async for m in b.client.models.list()] == ["tiny"]
        assert (await b.client.chat.completions.create(**CHAT)).choices[0].message.content == "x"

    bench(say("x"), body, keys=str(keys))


# ------------------------------------------------------------------ health and the rest


def test_health_is_progress(bench):
    async def body(b: Bench) -> None:
        assert (await b.call("GET", "/health"))[0] == 200
        b.engine.deaf.set()
        task = asyncio.create_task(b.call("POST", "/generate", {"text": "x"}))
        async with asyncio.timeout(5):
            while (await b.call("GET", "/health"))[0] == 200:
                await asyncio.sleep(0.05)
        status, _, raw = await b.call("GET", "/health")
        assert status == 503
        assert "1 requests open" in json.loads(raw)["error"]["message"]
        b.engine.deaf.clear()
        await task
        async with asyncio.timeout(5):
            while (await b.call("GET", "/health"))[0] != 200:
                await asyncio.sleep(0.05)

    bench(say("x"), body, stall_s=0.4)


def test_health_of_a_slow_but_living_engine(bench):
    async def body(b: Bench) -> None:
        b.engine.gate.clear()
        task = asyncio.create_task(b.call("POST", "/generate", {"text": "x"}))
        await b.until(lambda: sum(c.op == "stats" for c in b.engine.controls) >= 4)
        assert (await b.call("GET", "/health"))[0] == 200
        b.engine.gate.set()
        await task
        heard = b.service.link.last_heard
        await asyncio.sleep(0.5)  # longer than stall_s: an engine without work may be silent
        assert b.service.link.last_heard == heard
        assert (await b.call("GET", "/health"))[0] == 200

    bench(say("x"), body, stall_s=0.4)


def test_ready_and_health_generate(bench):
    async def body(b: Bench) -> None:
        assert (await b.call("GET", "/ready"))[0] == 503
        b.service.ready = True
        assert (await b.call("GET", "/ready"))[0] == 200
        assert (await b.call("GET", "/health_generate"))[0] == 200
        assert b.engine.generates[-1].sampling.max_tokens == 1
        b.service.draining = True
        assert (await b.call("GET", "/ready"))[0] == 503
        assert (await b.call("POST", "/generate", {"text": "x"}))[0] == 503
        await b.quiet()

    bench(say("x"), body)


def test_descriptions_load_and_metrics(bench):
    async def body(b: Bench) -> None:
        b.engine.outbox.append(wire.Load(2, 3, 400, 10, 16, 1, {"steps": 7.0, "recomputations": 2.0}))
        await b.until(lambda: b.service.link.load is not None)
        await b.client.chat.completions.create(**CHAT)
        found = await b.json("GET", "/server_info")
        assert (found["served_model_name"], found["disaggregation_mode"], found["model"]) == (
            "tiny",
            "prefill",
            "bytes",
        )
        assert found["disaggregation_bootstrap_port"] == 8998
        assert "tokenizer_path" not in found
        assert await b.json("GET", "/get_server_info") == found
        assert (await b.json("GET", "/model_info"))["model_path"] == "/m"
        (load,) = await b.json("GET", "/get_load")
        assert (load["num_reqs"], load["num_waiting_reqs"], load["num_tokens"], load["free_pages"]) == (
            5,
            3,
            400,
            10,
        )
        status, head, raw = await b.call("GET", "/metrics")
        assert (status, head["content-type"].split(";")[0]) == (200, "text/plain")
        for line in (
            'splitserve_requests_total{endpoint="chat",status="200"} 1.0',
            "splitserve_ttft_seconds_count 1.0",
            "splitserve_itl_seconds_count 2.0",
            "splitserve_output_tokens_total 3.0",
            'splitserve_engine_pages{state="quarantined"} 1.0',
            'splitserve_engine_pages{state="used"} 5.0',
            "splitserve_engine_steps_total 7.0",
            "splitserve_engine_recomputations_total 2.0",
        ):
            assert line in raw.decode().splitlines(), line

    bench(say("ab"), body, role=Role.PREFILL)


def test_tokenize_and_back(bench):
    async def body(b: Bench) -> None:
        got = await b.json("POST", "/tokenize", {"prompt": "Hé"})
        assert got == {"count": 3, "max_model_len": 512, "tokens": list("Hé".encode())}
        chat = await b.json("POST", "/tokenize", {"messages": CHAT["messages"]})
        assert chat["tokens"] == [258, *b"Hi", 259]
        assert (await b.json("POST", "/detokenize", {"tokens": got["tokens"]}))["text"] == "Hé"
        assert (await b.json("POST", "/detokenize", {"tokens": []}))["text"] == ""

    bench(say("x"), body)


def test_operators_calls(bench):
    async def body(b: Bench) -> None:
        assert await b.json("POST", "/flush_cache") == {"op": "flush_cache"}
        assert await b.json("GET", "/flush_cache?timeout=60") == {"op": "flush_cache"}
        await b.json("POST", "/debug/plant", {"fault": "drop_chunk", "times": 2})
        assert b.engine.controls[-1].args == {"fault": "drop_chunk", "times": 2}
        for path in ("/debug/poison", "/debug/check", "/debug/flush_cache"):
            await b.json("POST", path)
        for path in ("/debug/handoffs", "/debug/stats"):
            await b.json("GET", path)
        bad = {"code": "invariant_error", "message": "page 3 has two owners", "param": None, "status": 500}
        b.engine.replies["check"] = wire.Reply(0, False, bad)
        status, _, raw = await b.call("POST", "/debug/check")
        assert (status, json.loads(raw)["error"]["message"]) == (500, "page 3 has two owners")

    bench(say("x"), body, allow_faults=True)


def test_tokens_that_come_together_are_one_event(bench):
    def script(request: wire.Generate):
        return [
            TokenEvent(request.rid, tokens=tuple(b"abc")),
            TokenEvent(request.rid, finish=FinishReason.LENGTH),
        ]

    async def body(b: Bench) -> None:
        events = await b.events("/v1/completions", {"prompt": "q"})
        assert [e["choices"][0]["text"] for e in events] == ["abc", ""]

    bench(script, body)
