"""The router's own routes: readiness by a real token, workers at run time, keys, forwarding, metrics."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from splitserve.config import RouterConfig
from splitserve.errors import ConfigError, PortTaken
from splitserve.net.client import ClientResponse
from splitserve.net.keys import read_keys
from splitserve.router.dialects.ours import read_load
from splitserve.router.fleet import Endpoint, LoadSnapshot
from splitserve.router.main import Router
from splitserve.types import Role
from tests.fake_workers import FakeWorker, completes, error, silent, whole
from tests.wire_http import Answer, Wire, ask, go, request, until

PROMPT = {"model": "m", "prompt": "hi"}


@asynccontextmanager
async def running(workers: list[Endpoint], **config: Any) -> AsyncIterator[Router]:
    router = Router(RouterConfig(**{"port": 0, "health_interval_s": 0.05, **config}), workers)
    await router.start()
    try:
        yield router
    finally:
        await router.close()


def port_of(router: Router) -> int:
    assert router.server is not None
    return router.server.port


async def get(router: Router, path: str) -> Answer:
    return await ask(port_of(router), "GET", path)


async def pair() -> tuple[FakeWorker, FakeWorker, list[Endpoint]]:
    prefill, decode = await FakeWorker.start(whole(200, {})), await FakeWorker.start(completes())
    return prefill, decode, [Endpoint(prefill.url, Role.PREFILL, 8998), Endpoint(decode.url, Role.DECODE)]


# ---------------------------------------------------------------- ready


def test_ready_only_after_a_token_has_come_through() -> None:
    async def run() -> None:
        prefill, decode, workers = await pair()
        decode.probe_behaves = error(503, "transfer_failed")
        async with running(workers) as router:
            await until(lambda: all(m.healthy for m in router.fleet))
            await until(lambda: decode.probes >= 2)
            answer = await get(router, "/ready")
            assert answer.status == 503
            assert answer.json["unproven"] == ["prefill-0+decode-0"]
            refused = await ask(port_of(router), "POST", "/v1/completions", PROMPT)
            assert refused.status == 503
            assert "no token has come through" in refused.error["message"]
            assert (await get(router, "/health")).status == 200  # the router itself is well
            decode.probe_behaves = whole(200, {"text": "!"})
            await until(lambda: router.fleet.ready)
            assert (await get(router, "/ready")).json["ready"] is True
            assert decode.seen == []
            assert (await ask(port_of(router), "POST", "/v1/completions", PROMPT)).status == 200
        await prefill.die()
        await decode.die()

    go(run())


def test_a_pair_that_hangs_keeps_no_other_waiting() -> None:
    async def run() -> None:
        prefill, decode, workers = await pair()
        stuck = await FakeWorker.start(silent())
        stuck.probe_behaves = silent()
        async with running([Endpoint(stuck.url, Role.PREFILL, 1), *workers]) as router:
            await until(lambda: stuck.probes >= 1)
            await until(lambda: router.fleet.ready)
            for _ in range(4):
                assert (await ask(port_of(router), "POST", "/v1/completions", PROMPT)).status == 200
            assert stuck.seen == []
        for worker in (prefill, decode, stuck):
            await worker.die()

    go(run())


def test_no_workers_at_all() -> None:
    async def run() -> None:
        async with running([]) as router:
            assert (await get(router, "/ready")).status == 503
            refused = await ask(port_of(router), "POST", "/generate", {"text": "x"})
            assert (refused.status, refused.error["code"]) == (503, "overloaded")
            assert "no engine" in refused.error["message"]

    go(run())


def test_death_and_return_of_an_engine() -> None:
    """A dead engine is noticed at once, is not routed to, and comes back after a new token."""

    async def run() -> None:
        prefill, decode, workers = await pair()
        async with running(workers, alone=False) as router:
            await until(lambda: router.fleet.ready)
            probes = decode.probes
            await decode.die()
            await until(lambda: not router.fleet.ready, within_s=2)
            refused = await ask(port_of(router), "POST", "/v1/completions", PROMPT)
            assert refused.status == 503
            assert "decode-0" in refused.error["message"]
            await decode.rise()
            await until(lambda: router.fleet.ready)
            assert decode.probes > probes
            assert (await ask(port_of(router), "POST", "/v1/completions", PROMPT)).status == 200
        await prefill.die()
        await decode.die()

    go(run())


def test_bootstrap_port_is_asked_from_the_engine() -> None:
    async def run() -> None:
        prefill, decode, _ = await pair()
        workers = [Endpoint(prefill.url, Role.PREFILL), Endpoint(decode.url, Role.DECODE)]
        async with running(workers) as router:
            await asyncio.sleep(0.15)
            assert not router.fleet.ready  # nobody knows the port
            prefill.info = {"disaggregation_bootstrap_port": 4711}
            await until(lambda: router.fleet.ready)
            await ask(port_of(router), "POST", "/v1/completions", PROMPT)
            assert decode.seen[0].body["bootstrap_port"] == 4711
        await prefill.die()
        await decode.die()

    go(run())


# ---------------------------------------------------------------- workers at run time


def test_add_list_drain_remove() -> None:
    async def run() -> None:
        prefill, decode, workers = await pair()
        other = await FakeWorker.start(completes())
        async with running(workers) as router:
            port = port_of(router)
            await until(lambda: router.fleet.ready)
            added = await ask(port, "POST", "/workers", {"url": other.url, "worker_type": "decode"})
            assert added.status == 202
            worker_id = added.json["worker_id"]
            await until(lambda: router.fleet.num_proven == 2)
            listed = (await get(router, "/workers")).json["workers"]
            assert [w["url"] for w in listed] == [prefill.url, decode.url, other.url]
            assert (await ask(port, "POST", "/workers/decode-0/drain")).json["draining"] is True
            for _ in range(4):
                assert (await ask(port, "POST", "/v1/completions", PROMPT)).status == 200
            assert len(decode.seen) == 0
            assert len(other.seen) == 4
            await ask(port, "POST", "/workers/decode-0/undrain")
            assert (await ask(port, "DELETE", f"/workers/{worker_id}")).status == 200
            assert (await ask(port, "GET", f"/workers/{worker_id}")).status == 404
            assert (await ask(port, "POST", "/v1/completions", PROMPT)).status == 200
            assert len(decode.seen) == 1
        for worker in (prefill, decode, other):
            await worker.die()

    go(run())


def test_draining_the_last_one_is_told_not_hidden() -> None:
    async def run() -> None:
        prefill, decode, workers = await pair()
        async with running(workers) as router:
            await until(lambda: router.fleet.ready)
            await ask(port_of(router), "POST", "/workers/prefill-0/drain")
            refused = await ask(port_of(router), "POST", "/v1/completions", PROMPT)
            assert "prefill-0 (draining)" in refused.error["message"]
            assert (await get(router, "/ready")).status == 503
        await prefill.die()
        await decode.die()

    go(run())


def test_requests_of_a_removed_engine_may_end() -> None:
    async def run() -> None:
        prefill, decode, workers = await pair()
        decode.behaves = completes(6, gap_s=0.05)
        async with running(workers, drain_s=5.0, alone=False) as router:
            port = port_of(router)
            await until(lambda: router.fleet.ready)
            asking = asyncio.create_task(ask(port, "POST", "/v1/completions", PROMPT | {"stream": True}))
            await until(lambda: len(decode.seen) == 1)
            removed = await ask(port, "DELETE", "/workers/decode-0")
            assert removed.json == {"status": "removed", "worker_id": "decode-0", "num_inflight": 1}
            assert (await ask(port, "GET", "/workers/decode-0")).status == 404
            refused = await ask(port, "POST", "/v1/completions", PROMPT)
            assert (refused.status, len(decode.seen)) == (503, 1)  # nothing new goes there
            answer = await asking
            assert answer.status == 200
            assert answer.body.endswith(b"data: [DONE]\n\n")
            assert b"error" not in answer.body
            await until(lambda: not router.proxy._leaving)  # seen off as soon as it was done
            router.proxy.check()
        await prefill.die()
        await decode.die()

    go(run())


def test_an_engine_that_comes_back_while_it_is_seen_off_serves_on() -> None:
    async def run() -> None:
        prefill, decode, workers = await pair()
        decode.behaves = silent(head=True)
        async with running(workers, drain_s=0.3) as router:
            port = port_of(router)
            await until(lambda: router.fleet.ready)
            asking = asyncio.create_task(ask(port, "POST", "/v1/completions", PROMPT))
            await until(lambda: len(decode.seen) == 1)
            await ask(port, "DELETE", "/workers/decode-0")
            decode.behaves = completes(20, gap_s=0.03)  # longer than the old member's time
            await ask(port, "POST", "/workers", {"url": decode.url, "worker_type": "decode"})
            await until(lambda: router.fleet.ready)
            answer = await ask(port, "POST", "/v1/completions", PROMPT | {"stream": True})
            assert answer.body.endswith(b"data: [DONE]\n\n")
            assert b"error" not in answer.body
            assert (await asking).error["code"] == "peer_lost"
        await prefill.die()
        await decode.die()

    go(run())


def test_requests_of_a_removed_engine_that_do_not_end_get_an_error() -> None:
    async def run() -> None:
        prefill, decode, workers = await pair()
        decode.behaves = silent(head=True)
        async with running(workers, drain_s=0.2) as router:
            await until(lambda: router.fleet.ready)
            asking = asyncio.create_task(ask(port_of(router), "POST", "/v1/completions", PROMPT))
            await until(lambda: len(decode.seen) == 1)
            await ask(port_of(router), "DELETE", "/workers/decode-0")
            answer = await asking
            assert (answer.status, answer.error["code"]) == (502, "peer_lost")
            assert "decode-0 was removed" in answer.error["message"]
            await until(lambda: decode.num_left == 1)
        await prefill.die()
        await decode.die()

    go(run())


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"{", None),
        (b'{"url": 3}', None),
        (b'{"url": "https://x"}', "url"),
        (b'{"url": "http://127.0.0.1:1", "worker_type": "boss"}', "worker_type"),
        (b'{"url": "x", "worker_type": "decode"}', "url"),
        (b'{"url": "x"}', "url"),
        (b'{"url": "http://a b:5"}', "url"),
        (b'{"url": "http://a\\r\\nb", "worker_type": "decode"}', "url"),
        (b'{"url": "http://test/"}', "url"),  # the host that the client asked
        (b'{"url":' * 50_000 + b"1" + b"}" * 50_000, None),
    ],
)
def test_bad_workers_are_400(body: bytes, field: str | None) -> None:
    async def run() -> None:
        async with running([]) as router:
            answer = await ask(port_of(router), "POST", "/workers", body)
            assert answer.status == 400
            assert answer.error["param"] == field
            assert len(router.fleet) == 0

    go(run())


# ---------------------------------------------------------------- keys


def test_api_keys(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# ours\nsecret-one\n\nsecret-two\n")

    async def run() -> None:
        prefill, decode, workers = await pair()
        async with running(workers, api_key_file=str(keys)) as router:
            port = port_of(router)
            await until(lambda: router.fleet.ready)
            for header in ("", "authorization: Bearer wrong\r\n", "authorization: Basic secret-one\r\n"):
                for method, path in (("POST", "/v1/completions"), ("GET", "/workers"), ("GET", "/metrics")):
                    answer = await ask(port, method, path, PROMPT if method == "POST" else None, header)
                    assert (answer.status, answer.error["code"]) == (401, "unauthorized")
            for key in ("secret-one", "secret-two"):
                header = f"authorization: Bearer {key}\r\n"
                assert (await ask(port, "POST", "/v1/completions", PROMPT, header)).status == 200
            assert (await get(router, "/health")).status == 200
            assert (await get(router, "/ready")).status == 200
        await prefill.die()
        await decode.die()

    with caplog.at_level(logging.DEBUG):
        go(run())
    assert "secret" not in caplog.text


def test_key_files_that_hold_nothing(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.write_text("# nothing\n")
    for path in (empty, tmp_path / "missing"):
        with pytest.raises(ConfigError):
            read_keys(str(path))
    assert read_keys("") == ()


# ---------------------------------------------------------------- forwarding and description


def test_forwarding_to_one_and_to_all() -> None:
    async def run() -> None:
        prefill, decode, workers = await pair()
        decode.behaves = whole(200, {"data": [{"id": "m"}]})
        async with running(workers) as router:
            port = port_of(router)
            await until(lambda: router.fleet.ready)
            assert (await get(router, "/v1/models")).json["data"][0]["id"] == "m"
            async with asyncio.timeout(5):  # an answer to HEAD has a length and no body
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(b"HEAD /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
                head, _, rest = (await reader.read()).partition(b"\r\n\r\n")
                writer.close()
            assert head.startswith(b"HTTP/1.1 200")
            assert rest == b""
            assert (await ask(port, "POST", "/tokenize", {"prompt": "x"})).status == 200
            assert decode.seen[-1].body == {"prompt": "x"}
            assert prefill.seen == []
            flushed = await ask(port, "POST", "/flush_cache?timeout=5")
            assert flushed.status == 200
            assert set(flushed.json["workers"]) == {"prefill-0", "decode-0"}
            assert prefill.seen[-1].path == decode.seen[-1].path == "/flush_cache?timeout=5"
            prefill.behaves = whole(500, {})
            assert (await ask(port, "POST", "/flush_cache")).json["success"] is False
            prefill.behaves = decode.behaves = whole(400, {"error": {"param": "rid"}})
            refused = await ask(port, "POST", "/abort_request", {"rid": 7})
            assert (refused.status, refused.json["error"]["param"]) == (400, "rid")
        await prefill.die()
        await decode.die()

    go(run())


def test_openapi_is_an_engines_cut_to_what_passes_through_and_our_own() -> None:
    async def run() -> None:
        _, decode, workers = await pair()
        described = {
            "openapi": "3.1.0",
            "paths": {"/generate": {"post": {"summary": "x"}}, "/debug/plant": {}},
        }
        decode.behaves = whole(200, described)
        async with running(workers) as router:
            await until(lambda: router.fleet.ready)
            paths = (await get(router, "/openapi.json")).json["paths"]
            assert paths["/generate"] == {"post": {"summary": "x"}}
            assert "/debug/plant" not in paths
            assert set(paths["/workers"]) == {"get", "post"}
            assert set(paths["/workers/{id}"]) == {"get", "delete"}
        await decode.die()

    go(run())


def test_unknown_paths_and_methods() -> None:
    async def run() -> None:
        async with running([]) as router:
            missing = await get(router, "/nothing")
            assert missing.status == 404
            assert missing.error["fix"] == "docs/router.md lists the paths"
            assert (await get(router, "/generate")).status == 400
            assert (await ask(port_of(router), "PUT", "/workers", {})).status == 400
            assert (await ask(port_of(router), "POST", "/workers/x/y", {})).status == 404
            assert (await get(router, "/v1/models")).status == 503

    go(run())


def test_health_generate_sends_a_token_through() -> None:
    async def run() -> None:
        prefill, decode, workers = await pair()
        async with running(workers) as router:
            await until(lambda: router.fleet.ready)
            before = decode.probes
            assert (await get(router, "/health_generate")).status == 200
            assert decode.probes == before + 1
        await prefill.die()
        await decode.die()

    go(run())


def test_metrics_are_prometheus_text() -> None:
    from prometheus_client.parser import text_string_to_metric_families

    async def run() -> None:
        prefill, decode, workers = await pair()
        async with running(workers, route_header=True) as router:
            await until(lambda: router.fleet.ready)
            answer = await ask(port_of(router), "POST", "/v1/completions", PROMPT)
            assert answer.headers["x-splitserve-route"].startswith("prefill=prefill-0, answer=decode-0, why=")
            told = await get(router, "/metrics")
            families = {f.name: f for f in text_string_to_metric_families(told.body.decode())}
            samples = {
                (s.name, tuple(s.labels.items())): s.value for f in families.values() for s in f.samples
            }
            assert samples["splitserve_router_requests_total", (("outcome", "ok"),)] == 1
            assert samples["splitserve_router_ready", ()] == 1
            assert samples["splitserve_router_first_byte_seconds_count", ()] == 1
            assert families["splitserve_router_request_seconds"].type == "histogram"
            info = (await get(router, "/server_info")).json
            assert info["policy"] == "round_robin"
            assert [w["num_inflight"] for w in (await get(router, "/get_load")).json] == [0, 0]
        await prefill.die()
        await decode.die()

    go(run())


def test_a_taken_port_is_told() -> None:
    async def run() -> None:
        async with running([]) as router:
            other = Router(RouterConfig(port=port_of(router)))
            with pytest.raises(PortTaken):
                await other.start()
            await other.close()

    go(run())


def test_stopping_ends_what_runs_with_a_typed_error() -> None:
    async def run() -> None:
        prefill, decode, workers = await pair()
        decode.behaves = silent(head=True)
        router = Router(RouterConfig(port=0, health_interval_s=0.05), workers)
        await router.start()
        await until(lambda: router.fleet.ready)
        asking = asyncio.create_task(ask(port_of(router), "POST", "/v1/completions", PROMPT))
        await until(lambda: len(decode.seen) == 1)
        await router.close(0.1)
        answer = await asking
        assert (answer.status, answer.error["message"]) == (503, "the router is stopping")
        await until(lambda: decode.num_left == 1)
        await until(lambda: decode.num_connections == prefill.num_connections == 0)
        await prefill.die()
        await decode.die()

    go(run())


def test_fuzzed_bodies_no_500_no_hang() -> None:
    """Malformed requests against the whole router with a ready pair."""
    import random

    rng = random.Random(4)
    seed = json.dumps({"model": "m", "prompt": ["a", [1, 2]], "n": 2, "stream": False, "seed": None}).encode()

    def mutate() -> bytes:
        found = bytearray(seed)
        for _ in range(rng.randint(0, 4)):
            at = rng.randrange(len(found))
            found[at : at + rng.randint(0, 3)] = rng.choice(
                [b"", b'"', b"{", b"}", b"\xff", b"null", b"1e999", b",", b"\\u"]
            )
        return bytes(found) or b"x"

    async def run() -> None:
        prefill, decode, workers = await pair()
        statuses: dict[int, int] = {}

        async with running(workers) as router:
            await until(lambda: router.fleet.ready)
            decode.behaves = whole(200, {})

            async def lane() -> None:
                async with await Wire.open(port_of(router)) as wire:
                    for _ in range(50):
                        path = rng.choice(
                            ["/v1/completions", "/generate", "/workers", "/v1/other", "/tokenize"]
                        )
                        await wire.send(request("POST", path, mutate()))
                        status = (await wire.answer()).status
                        statuses[status] = statuses.get(status, 0) + 1

            async with asyncio.TaskGroup() as group:
                for _ in range(20):
                    group.create_task(lane())
            router.proxy.check()
        await prefill.die()
        await decode.die()
        assert not [s for s in statuses if s >= 500], statuses
        assert sum(statuses.values()) == 1000

    go(run(), within_s=60)


# ---------------------------------------------------------------- loads


@pytest.mark.parametrize(
    ("body", "load"),
    [
        (b'[{"dp_rank":0,"num_reqs":5,"num_waiting_reqs":2},{"num_reqs":1}]', LoadSnapshot(4, 2)),
        (b'{"num_reqs":3,"queued_tokens":7,"free_pages":1,"total_pages":9}', LoadSnapshot(3, 0, 7, 1, 9)),
        (b'[{"num_reqs":-5,"num_waiting_reqs":"x","queued_tokens":true,"free_pages":1e99}]', LoadSnapshot()),
        (
            b'[{"num_reqs":1,"prompt_tokens":9,"output_tokens":4,"lanes":["cma","tcp/lo"]},{"lanes":["cma"]}]',
            LoadSnapshot(1, prompt_tokens=9, output_tokens=4, lane="cma, tcp/lo"),
        ),
        (b'{"num_reqs":1,"lanes":"cma"}', LoadSnapshot(1)),
        (b"no json", LoadSnapshot()),
        (b"null", LoadSnapshot()),
        (b"[1,[2]]", LoadSnapshot()),
    ],
)
def test_loads_of_any_engine(body: bytes, load: LoadSnapshot) -> None:
    assert read_load(ClientResponse(200, {}, body)) == load
    assert read_load(ClientResponse(404, {}, body)) == LoadSnapshot()
