"""The benchmark: workloads are what they say, figures follow from marks, and a bad target is told, not measured."""

from __future__ import annotations

import asyncio
import fcntl
import io
import json
import math
import os
import random
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from splitserve.bench import report, runs
from splitserve.bench.client import LoadClient
from splitserve.bench.main import bench, measure, run
from splitserve.bench.metrics import Marks, Slo, Spread, percentile, summarize
from splitserve.bench.plan import Outputs, Plan, from_words, undetached
from splitserve.bench.workload import (
    TRACE_BLOCK,
    Vocabulary,
    random_asks,
    read_trace,
    trace_asks,
)
from splitserve.errors import ConfigError
from splitserve.net.client import Client
from splitserve.net.http import App, HttpServer, Request, Responder, serve
from tests.wire_http import go

# ---------------------------------------------------------------- workloads


def test_prompts_have_exact_lengths_and_are_new_each_run() -> None:
    vocabulary = Vocabulary.of_size(1000)
    runs = [
        random_asks(5, input_len=37, output_len=3, rng=random.Random(s), vocabulary=vocabulary)
        for s in (1, 2)
    ]
    for ask in (*runs[0], *runs[1]):
        assert len(ask.prompt) == 37
        assert all(vocabulary.low <= t < 1000 for t in ask.prompt)
    assert len({a.prompt for a in (*runs[0], *runs[1])}) == 10
    again = random_asks(5, input_len=37, output_len=3, rng=random.Random(1), vocabulary=vocabulary)
    assert again == runs[0]


def test_poisson_arrivals() -> None:
    asks = random_asks(
        4000, input_len=1, output_len=1, rng=random.Random(5), vocabulary=Vocabulary(), rate=20.0
    )
    times = [a.at_s for a in asks]
    assert times == sorted(times)
    gaps = np.diff([0.0, *times])
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.1)
    assert gaps.std() == pytest.approx(1 / 20, rel=0.1)  # exponential: as wide as its mean


MOONCAKE = """
{"timestamp": 1000, "input_length": 1100, "output_length": 5, "hash_ids": [7, 8, 9]}
{"timestamp": 3500, "input_length": 600, "output_length": 900, "hash_ids": [7, 10]}
"""


def test_mooncake_traces_keep_shared_prefixes(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(MOONCAKE.strip())
    rows = read_trace(path)
    assert [r.at_s for r in rows] == [0.0, 2.5]
    one, other = trace_asks(rows, seed=1, vocabulary=Vocabulary(), max_output=100, speed=2.0)
    assert (len(one.prompt), len(other.prompt)) == (1100, 600)
    assert one.prompt[:TRACE_BLOCK] == other.prompt[:TRACE_BLOCK]
    assert one.prompt[TRACE_BLOCK:600] != other.prompt[TRACE_BLOCK:]
    assert (one.output_len, other.output_len, other.at_s) == (5, 100, 1.25)
    assert len(read_trace(path, limit=1)) == 1


def test_azure_traces(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
    )
    one, other = read_trace(path)
    assert (one.input_len, one.output_len, one.at_s) == (374, 44, 0.0)
    assert other.at_s == pytest.approx(4.314579, abs=1e-5)


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("t.jsonl", '{"timestamp": 1, "input_length": 1, "output_length": 1}\n{"x": 1}', "line 2"),
        ("t.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2", "line 2"),
        ("t.csv", "a,b\n1,2", "line 2"),
        ("t.jsonl", "", "empty"),
    ],
)
def test_broken_traces_name_the_line(tmp_path: Path, name: str, text: str, told: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError, match=told):
        read_trace(path)
    with pytest.raises(ConfigError, match="cannot read"):
        read_trace(tmp_path / "missing")


# ---------------------------------------------------------------- metrics


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50), st.floats(0, 100))
def test_percentile_is_numpys(values: list[float], p: float) -> None:
    assert percentile(values, p) == pytest.approx(float(np.percentile(values, p)), rel=1e-9, abs=1e-6)


def marks(
    *, ttft: float = 0.1, gaps: tuple[float, ...] = (0.02, 0.04), usage: int = 3, error: str = ""
) -> Marks:
    m = Marks(num_input=10, num_wanted=3, sent_s=5.0, error=error)
    if error:
        return m
    m.first_s = 5.0 + ttft
    m.gaps_s = list(gaps)
    m.num_events = 1 + len(gaps)
    m.end_s = m.first_s + sum(gaps)
    m.usage_input, m.usage_output = 10, usage
    return m


def test_figures_of_a_run() -> None:
    found = summarize([marks(), marks(ttft=0.3), marks(error="refused")], duration_s=2.0, concurrency=2)
    assert (found.num, found.num_failed) == (3, 1)
    assert found.ttft_s.mean == pytest.approx(0.2)
    assert found.tpot_s.mean == pytest.approx(0.03)
    assert found.itl_s.max == pytest.approx(0.04)
    assert found.e2e_s.max == pytest.approx(0.36)
    assert found.output_rate == 3.0
    assert found.input_rate == 10.0
    assert found.request_rate == 1.0
    assert found.errors == (("refused", 1),)
    assert found.mismatches == ()
    assert found.mean_running == pytest.approx((0.16 + 0.36) / 2)


def test_goodput_counts_only_who_keeps_both_limits() -> None:
    run = [marks(), marks(ttft=0.3), marks(gaps=(0.2, 0.2)), marks(error="x")]
    assert summarize(run, duration_s=2.0, slo=Slo(0.2, 0.05)).goodput == 0.5
    assert summarize(run, duration_s=2.0).goodput is None


def test_one_token_has_no_time_per_token() -> None:
    found = summarize([marks(gaps=(), usage=1)], duration_s=1.0)
    assert math.isnan(found.tpot_s.mean)
    assert Slo(1, 0.0001).met(marks(gaps=(), usage=1))


@pytest.mark.parametrize(
    ("usage_in", "usage_out", "events", "told"),
    [
        (10, 3, 3, ""),
        (10, 3, 2, ""),  # two tokens in one event: fine
        (10, 2, 2, "3 tokens asked for"),
        (11, 3, 3, "10 prompt tokens sent"),
        (10, 3, 4, "4 token events came"),
        (-1, -1, 3, "no usage"),
    ],
)
def test_counts_are_reconciled(usage_in: int, usage_out: int, events: int, told: str) -> None:
    m = marks()
    m.usage_input, m.usage_output, m.num_events = usage_in, usage_out, events
    assert told in m.mismatch()
    assert bool(m.mismatch()) == bool(told)


# ---------------------------------------------------------------- a whole run against a scripted server


GAP_S = 0.01


async def engine(req: Request, res: Responder) -> None:
    """Answers as an OpenAI server does: one event a token, usage last, GAP_S between tokens."""
    if req.path == "/v1/models":
        res.send_json(200, {"data": [{"id": "fake"}]})
        return
    if req.path == "/model_info":
        res.send_json(200, {"vocab_size": 500})
        return
    body = json.loads(req.body)
    assert body["stream"]
    assert body["ignore_eos"]
    assert all(0 < t < 500 for t in body["prompt"])
    res.start_stream()
    await asyncio.sleep(GAP_S)
    for i in range(body["max_tokens"]):
        res.write(b'data: {"choices":[{"index":0,"text":" t"}]}\n\n')
        if i + 1 < body["max_tokens"]:
            await asyncio.sleep(GAP_S)
    usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
    res.write(b'data: {"choices":[{"index":0,"text":"","finish_reason":"length"}]}\n\n')
    res.write(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n")
    res.end(b"data: [DONE]\n\n")


@asynccontextmanager
async def served(app: App) -> AsyncIterator[HttpServer]:
    server = await serve(app, host="127.0.0.1", port=0)
    yield server
    await server.close()


def plan(server: HttpServer, **more: object) -> Plan:
    settings = {"concurrency": (1, 4), "num": (2, 8), "input_len": 20, "output_len": 5, **more}
    return Plan(f"http://127.0.0.1:{server.port}", **settings)  # type: ignore[arg-type]


def test_closed_loops() -> None:
    async def go_() -> None:
        async with served(engine) as server:
            summaries, facts = await measure(plan(server, slo=Slo(1, 1)), Console(file=io.StringIO()))
            assert facts["model"] == "fake"
            assert [(s.concurrency, s.num, s.num_failed) for s in summaries] == [(1, 2, 0), (4, 8, 0)]
            for s in summaries:
                assert s.mismatches == ()
                assert s.num_output == s.num * 5
                assert s.num_input == s.num * 20
                assert GAP_S * 0.8 < s.tpot_s.median < GAP_S * 10
                assert s.ttft_s.median > GAP_S * 0.8
                assert s.goodput == pytest.approx(s.request_rate)
            assert summaries[1].mean_running > 2  # four lanes were busy

    go(go_())


def test_open_loop_sends_at_its_times() -> None:
    async def go_() -> None:
        async with served(engine) as server:
            found, _ = await measure(
                plan(server, rates=(20.0,), num=(10,), seed=1), Console(file=io.StringIO())
            )
            assert found[0].num == 10
            assert found[0].num_failed == 0
            assert 0.3 < found[0].duration_s < 3  # ten arrivals at 20 a second; a request takes 0.05

    go(go_())


FAILURES = {
    "refuses": "HTTP 400: too long",
    "dies": "the connection broke",
    "error event": "error event: gone",
    "no done": "without [DONE]",
    "nonsense": "no completion event",
    "silent": "no complete answer within",
}


@pytest.mark.parametrize("how", FAILURES)
def test_failures_are_marked_and_counted(how: str) -> None:
    async def failing(req: Request, res: Responder) -> None:
        if how == "refuses":
            res.send_json(400, {"error": {"message": "too long"}})
            return
        res.start_stream()
        if how == "silent":
            await res.closed.wait()
        elif how == "dies":
            res.write(b'data: {"choices":[{"index":0,"text":" t"}]}\n\n')
            await asyncio.sleep(0.01)
            res.abort()
        elif how == "error event":
            res.end(b'data: {"error":{"message":"gone"}}\n\ndata: [DONE]\n\n')
        elif how == "no done":
            res.end(b'data: {"choices":[{"index":0,"text":" t"}]}\n\n')
        else:
            res.end(b"data: 3\n\ndata: [DONE]\n\n")

    async def go_() -> None:
        async with served(failing) as server, Client() as client:
            url = f"http://127.0.0.1:{server.port}"
            load = LoadClient(client, url, model="m", now=time.perf_counter, timeout_s=0.3)
            asks = random_asks(
                3, input_len=4, output_len=2, rng=random.Random(1), vocabulary=Vocabulary.of_size(99)
            )
            found, duration = await load.closed_loop(asks, 2)
            summary = summarize(found, duration_s=duration, concurrency=2)
            assert summary.num_failed == 3
            assert FAILURES[how] in summary.errors[0][0]

    go(go_())


def test_a_server_that_closes_after_each_answer_is_asked_again() -> None:
    """Without a word, though its answer promises to keep the connection: llama.cpp's does."""
    asked = 0

    async def closing(req: Request, res: Responder) -> None:
        nonlocal asked
        asked += 1
        if asked % 2 == 0:  # the answer before was its connection's last
            res.abort()
            return
        await engine(req, res)

    async def go_() -> None:
        async with served(closing) as server, Client() as client:
            load = LoadClient(client, f"http://127.0.0.1:{server.port}", model="m", now=time.perf_counter)
            asks = random_asks(
                4, input_len=4, output_len=2, rng=random.Random(1), vocabulary=Vocabulary.of_size(99)
            )
            found, _ = await load.closed_loop(asks, 1)
            assert [m.error for m in found] == [""] * 4
            assert asked == 7

    go(go_())


def test_a_server_that_dies_in_mid_run_is_counted_not_hung() -> None:
    count = 0

    async def dying(req: Request, res: Responder) -> None:
        nonlocal count
        if req.path == "/v1/completions":
            count += 1
            if count > 9:  # warm-ups take 1 and 4, the first shape 2: it dies in the second shape
                res.abort()
                return
        await engine(req, res)

    async def go_() -> None:
        async with served(dying) as server:
            summaries, _ = await measure(plan(server), Console(file=io.StringIO()))
            assert [s.num_failed for s in summaries] == [0, 6]
            assert "broke" in summaries[1].errors[0][0]

    go(go_())


# ---------------------------------------------------------------- bad targets


def test_unreachable_target() -> None:
    with pytest.raises(ConfigError, match="cannot connect") as caught:
        run(["http://127.0.0.1:1"], runs_dir=Path())
    assert caught.value.fix


@pytest.mark.parametrize(
    ("status", "body", "told"),
    [(401, {}, "API key"), (503, {"error": "x"}, "answered 503"), (200, {"data": []}, "no model name")],
)
def test_targets_that_cannot_be_measured(status: int, body: dict[str, object], told: str) -> None:
    def app(req: Request, res: Responder) -> None:
        res.send_json(status, body)

    async def go_() -> None:
        async with served(app) as server:
            with pytest.raises(ConfigError, match=told):
                await measure(plan(server), Console(file=io.StringIO()))

    go(go_())


# ---------------------------------------------------------------- words and reports


def test_words() -> None:
    found, outputs = from_words(
        ["h:1", "--concurrency", "2,3", "--num", "5", "--json", "out.json", "--seed", "4"]
    )
    assert (found.url, found.shapes, found.seed, outputs.json) == ("h:1", [(2, 5), (3, 5)], 4, "out.json")
    assert from_words([])[0].shapes == [(1, 6), (8, 24), (16, 32)]
    assert from_words(["--json"])[1].json == "-"
    assert from_words(["--slo-ttft-ms", "500", "--slo-tpot-ms", "50"])[0].slo == Slo(0.5, 0.05)


@pytest.mark.parametrize(
    "words",
    [
        ["--concurrency", "1,2", "--num", "1,2,3"],
        ["--concurrency", "0"],
        ["--num", "0"],
        ["--input-len", "0"],
        ["--rate", "0"],
        ["--rate", "nan"],
        ["--slo-ttft-ms", "5"],
    ],
)
def test_words_that_cannot_be(words: list[str]) -> None:
    with pytest.raises(ConfigError):
        from_words(words)


def test_json_has_both_names_and_no_nan() -> None:
    summary = summarize([marks(gaps=(), usage=1)], duration_s=1.0, concurrency=1)
    told = json.loads(json.dumps(report.to_json(summary), allow_nan=False))
    assert told["ttft_s"]["mean"] == pytest.approx(0.1)
    assert told["tpot_s"]["mean"] is None
    theirs = told["bench_serving"]
    for name in (
        "mean_ttft_ms",
        "median_tpot_ms",
        "p99_itl_ms",
        "mean_e2e_latency_ms",
        "output_throughput",
        "completed",
    ):
        assert name in theirs
    assert theirs["mean_ttft_ms"] == pytest.approx(100)


def test_report_tells_failures_and_differences() -> None:
    off = marks()
    off.usage_output = 2
    text = io.StringIO()
    summary = summarize([off, marks(error="it broke")], duration_s=1.0, concurrency=3)
    report.print_report(Console(file=text, width=200), [summary], "title")
    for told in ("c=3", "1 failed", "it broke", "3 tokens asked for, the server counted 2"):
        assert told in text.getvalue()


def test_spread_of_nothing() -> None:
    assert math.isnan(Spread.of([]).p99)


@pytest.fixture
def target() -> Iterator[str]:
    """URL of the fake engine, served in a thread of its own."""
    ready = threading.Event()
    box: dict[str, Any] = {}

    def serve_in_thread() -> None:
        async def main() -> None:
            server = await serve(engine, host="127.0.0.1", port=0)
            box.update(port=server.port, stop=asyncio.Event(), loop=asyncio.get_running_loop())
            ready.set()
            await box["stop"].wait()
            await server.close()

        asyncio.run(main())

    thread = threading.Thread(target=serve_in_thread)
    thread.start()
    assert ready.wait(5)
    yield f"http://127.0.0.1:{box['port']}"
    box["loop"].call_soon_threadsafe(box["stop"].set)
    thread.join(5)


def test_exit_code_and_files(target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The whole command."""
    path, page = tmp_path / "out.json", tmp_path / "out.html"
    asked = Plan(target, (2, 3), (4,), 8, 3)
    assert bench(asked, Outputs(json=str(path), html=str(page))) == 0
    told = json.loads(path.read_text())
    assert told["results"][0]["num"] == 4
    assert told["results"][0]["mismatches"] == {}
    assert "TTFT" in capsys.readouterr().out
    drawn = page.read_text()
    assert drawn.count("<svg") == 5
    assert "<td>c=3</td>" in drawn
    assert "http-equiv" not in drawn
    assert "<script" not in drawn
    assert bench(asked, Outputs(json="-")) == 0
    assert json.loads(capsys.readouterr().out)["model"] == "fake"


# ---------------------------------------------------------------- without a terminal


PROGRAM = (sys.executable, "-m", "splitserve")
SHORT = ["--concurrency", "2", "--num", "4", "--input-len", "8", "--output-len", "3"]


def wait_for_end(where: Path, name: str) -> dict[str, Any]:
    end = time.monotonic() + 30
    while (found := runs.describe(runs.find(where, name)))["state"] == "running":
        assert time.monotonic() < end, found
        time.sleep(0.05)
    return found


def test_a_detached_run_leaves_its_figures(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = tmp_path / ".bench"
    assert run([target, "--detach", "--json", *SHORT], program=PROGRAM, runs_dir=where) == 0
    name = json.loads(capsys.readouterr().out)["id"]
    found = wait_for_end(where, name)
    assert (found["state"], found["code"], found["url"]) == ("done", 0, target)
    assert run(["status"], runs_dir=where) == 0
    assert f"{name}  done" in capsys.readouterr().out
    assert run(["status", name, "--json"], runs_dir=where) == 0
    assert json.loads(capsys.readouterr().out)["runs"][0]["id"] == name
    assert run(["results", name], runs_dir=where) == 0
    assert "TTFT" in capsys.readouterr().out
    assert run(["results", name, "--json"], runs_dir=where) == 0
    assert json.loads(capsys.readouterr().out)["results"][0]["num"] == 4
    assert run(["results", name, "--html", str(tmp_path / "page.html")], runs_dir=where) == 0
    assert "<svg" in (tmp_path / "page.html").read_text()


def test_a_detached_run_that_fails_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = tmp_path / ".bench"
    assert run(["http://127.0.0.1:1", "--detach", *SHORT], program=PROGRAM, runs_dir=where) == 0
    name = capsys.readouterr().out.split()[0]
    found = wait_for_end(where, name)
    assert (found["state"], found["code"]) == ("failed", 2)
    assert run(["results", name], runs_dir=where) == 1
    assert f"{name} is failed" in capsys.readouterr().err


def test_a_detached_run_that_is_killed_is_known_to_be_dead(target: str, tmp_path: Path) -> None:
    where = tmp_path / ".bench"
    words = [target, "--detach", "--concurrency", "1", "--num", "100000", "--output-len", "3"]
    assert run(words, program=PROGRAM, runs_dir=where) == 0
    (one,) = runs.newest_first(where)
    end = time.monotonic() + 20
    while not one.read().pid:
        assert time.monotonic() < end
        time.sleep(0.02)
    assert os.getsid(one.read().pid) == one.read().pid  # no hang-up of this terminal reaches it
    assert one.read().state == "running"
    os.kill(one.read().pid, signal.SIGKILL)
    assert wait_for_end(where, one.path.name)["state"] == "died"


@pytest.mark.parametrize("name", ["20261130-000000-abcd", "../x", ""])
def test_no_such_run_is_a_wrong_word(tmp_path: Path, name: str) -> None:
    for command in ("status", "results") if name else ():
        with pytest.raises(ConfigError, match="no run"):
            run([command, name], runs_dir=tmp_path)
    assert run(["status"], runs_dir=tmp_path) == 0


def ended_run(where: Path, number: int) -> runs.Run:
    """A run of long ago."""
    run_ = runs.Run(where / f"20260101-000000-{number:04x}")
    run_.path.mkdir(parents=True)
    run_.write(runs.State(run_.path.name, "h:1", (), 1, 0.0, "done", 0, 1.0))
    (run_.path / "lock").touch()
    return run_


def test_runs_that_have_ended_go_when_told_and_when_there_are_many(tmp_path: Path) -> None:
    where = tmp_path / ".bench"
    old = [ended_run(where, number) for number in range(runs.KEEP + 2)]
    with open(old[0].path / "lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # still running
        with pytest.raises(ConfigError, match="is running"):
            run(["remove", old[0].path.name], runs_dir=where)
        assert run(["h:1", "--detach"], program=("true",), runs_dir=where) == 0
        left = [one.path.name for one in runs.newest_first(where)]
    assert len(left) == runs.KEEP + 1
    assert old[0].path.name in left
    assert [one.path.name in left for one in old[1:5]] == [False, False, True, True]
    assert run(["remove", left[-1], left[-2]], runs_dir=where) == 0
    assert len(runs.newest_first(where)) == runs.KEEP - 1
    with pytest.raises(ConfigError, match="no run"):
        run(["remove", left[-1]], runs_dir=where)


def test_what_cannot_be_is_said_before_anything_is_started(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        run(["--detach", "--input-len", "0"], program=PROGRAM, runs_dir=tmp_path)
    assert not list(tmp_path.iterdir())


def test_words_of_the_process_that_detach_starts() -> None:
    assert undetached(["-d", "--json", "--seed", "1"], url="h:1") == ["--seed", "1", "h:1"]
    assert undetached(["h:2", "--detach", "--json", "f"], url="h:2") == ["h:2", "--json", "f"]
