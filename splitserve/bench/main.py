"""`splitserve bench`: warm up, load a server shape by shape, reconcile the counts, report.

Exit code 0 when every request was answered, 1 when some failed; ConfigError (exit code 2) when the target cannot be
measured at all.
"""

from __future__ import annotations

import os
import platform
import random
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import splitserve
from splitserve.errors import ConfigError, SplitserveError
from splitserve.net.client import Client
from splitserve.net.keys import ENVIRONMENT, bearer
from splitserve.net.upstream import split_url
from splitserve.words import command_line

from . import detached, report
from .client import LoadClient
from .metrics import Marks, Summary, summarize
from .plan import Outputs, Plan, from_words, no_key
from .runs import Run
from .workload import Ask, Vocabulary, random_asks, read_trace, trace_asks

WARM_TOKENS = 4
_LINE_EVERY_S = 5.0


def run(
    words: Sequence[str],
    *,
    running_url: str = "",
    key_of: Callable[[str], str] = no_key,
    program: Sequence[str] = (),
    runs_dir: Path,
) -> int:
    """The command: `words` are those behind it, `running_url` is of the deployment that is up, if any.

    `key_of` knows the API keys of what is up, by URL. `program` starts itself again for --detach, whose runs are kept
    in `runs_dir`.
    """
    if words and words[0] in detached.COMMANDS:
        return detached.COMMANDS[words[0]](words[1:], runs_dir)
    plan, outputs = from_words(words, running_url=running_url, key_of=key_of)
    if outputs.detach:
        return detached.begin(words, plan, outputs, runs_dir=runs_dir, program=program)
    if outputs.recorded:
        return detached.recorded(Path(outputs.recorded), lambda own: bench(plan, outputs, record=own))
    return bench(plan, outputs)


def bench(plan: Plan, outputs: Outputs | None = None, *, record: Run | None = None) -> int:
    """Measure, print the table and write what `outputs` asks for; `record` keeps all of it."""
    import uvloop

    plan.check()
    outputs = outputs or Outputs()
    to_stdout = outputs.json == "-"
    console = Console(stderr=to_stdout)
    summaries, facts = uvloop.run(measure(plan, console))
    text, html = _to_text(summaries, facts), report.to_html(summaries, facts)
    if to_stdout:
        sys.stdout.write(text)
    else:
        report.print_report(console, summaries, f"{facts['url']}  {facts['model']}  {facts['workload']}")
    for path, content in ((outputs.json, text), (outputs.html, html)):
        if path not in ("", "-"):
            Path(path).write_text(content, encoding="utf-8")
            console.print(f"written to {path}", highlight=False)
    if record is not None:
        record.result.write_text(text, encoding="utf-8")
        record.page.write_text(html, encoding="utf-8")
    return 1 if any(s.num_failed for s in summaries) else 0


async def measure(plan: Plan, console: Console) -> tuple[list[Summary], dict[str, Any]]:
    """All shapes of a plan, one after another, and the facts that make them repeatable."""
    plan.check()
    origin, _ = split_url(plan.url)
    url = f"http://{origin.authority}"
    async with Client() as client:
        model, vocabulary = await find_target(client, url, plan)
        seed = plan.seed if plan.seed is not None else random.SystemRandom().getrandbits(48)
        load = LoadClient(
            client, url, model=model, now=time.perf_counter, timeout_s=plan.timeout_s, api_key=plan.api_key
        )
        facts = _facts(plan, url, model, seed)
        loops = _trace_loop if plan.trace is not None else _open_loops if plan.rates else _closed_loops
        summaries = await loops(plan, load, vocabulary, seed, console)
        return summaries, {**facts, "finished": _now()}


async def _closed_loops(
    plan: Plan, load: LoadClient, vocabulary: Vocabulary, seed: int, console: Console
) -> list[Summary]:
    summaries = []
    for concurrency, num in plan.shapes:
        rng = random.Random(f"{seed}/{concurrency}")
        draw = partial(random_asks, input_len=plan.input_len, rng=rng, vocabulary=vocabulary)
        warm = draw(min(concurrency, 4), output_len=min(WARM_TOKENS, plan.output_len))
        await warm_up(load, warm, partial(_warn, console))
        asks = draw(num, output_len=plan.output_len)
        with _Ticker(console, f"c={concurrency}", len(asks)) as ticker:
            marks, duration_s = await load.closed_loop(asks, concurrency, ticker.tick)
        summaries.append(summarize(marks, duration_s=duration_s, concurrency=concurrency, slo=plan.slo))
    return summaries


async def _open_loops(
    plan: Plan, load: LoadClient, vocabulary: Vocabulary, seed: int, console: Console
) -> list[Summary]:
    summaries = []
    for rate, num in plan.open_shapes:
        rng = random.Random(f"{seed}/{rate:g}")
        draw = partial(random_asks, input_len=plan.input_len, rng=rng, vocabulary=vocabulary)
        await warm_up(load, draw(1, output_len=min(WARM_TOKENS, plan.output_len)), partial(_warn, console))
        asks = draw(num, output_len=plan.output_len, rate=rate)
        with _Ticker(console, f"{rate:g}/s", len(asks)) as ticker:
            marks, duration_s = await load.open_loop(asks, ticker.tick)
        summaries.append(summarize(marks, duration_s=duration_s, rate=rate, slo=plan.slo))
    return summaries


async def _trace_loop(
    plan: Plan, load: LoadClient, vocabulary: Vocabulary, seed: int, console: Console
) -> list[Summary]:
    assert plan.trace is not None
    rows = read_trace(plan.trace, plan.num[0])
    asks = trace_asks(
        rows, seed=seed, vocabulary=vocabulary, max_input=plan.input_len, max_output=plan.output_len
    )
    first = Ask(
        vocabulary.draw(random.Random(f"{seed}/open"), plan.input_len), min(WARM_TOKENS, plan.output_len)
    )
    await warm_up(load, [first], partial(_warn, console))
    with _Ticker(console, "trace", len(asks)) as ticker:
        marks, duration_s = await load.open_loop(asks, ticker.tick)
    return [summarize(marks, duration_s=duration_s, slo=plan.slo)]


async def warm_up(load: LoadClient, asks: Sequence[Ask], warn: Callable[[str], None]) -> None:
    """Untimed requests of this shape. ConfigError when the server refuses it: the run would measure nothing."""
    marks, _ = await load.closed_loop(asks, len(asks))
    failed = [m for m in marks if not m.ok]
    if len(failed) == len(marks):
        why = failed[0].error or "no token came"
        raise ConfigError(
            f"the server does not answer this load: {why}", fix="try it with curl, or shorter lengths"
        )
    for mark in failed:
        warn(f"warm-up: {mark.error}")


def _warn(console: Console, text: str) -> None:
    console.print(f"[yellow]{text}[/]", highlight=False)


async def find_target(client: Client, url: str, plan: Plan) -> tuple[str, Vocabulary]:
    """The model's name and its vocabulary, as far as the server tells. ConfigError when there is no such server."""
    headers = bearer(plan.api_key)
    try:
        models = await client.request("GET", f"{url}/v1/models", headers=headers, timeout_s=10.0)
    except SplitserveError as e:
        raise ConfigError(
            e.message, field="url", fix="start one with `splitserve up`, or give its URL"
        ) from None
    if models.status == 401:
        why = "does not know this API key" if plan.api_key else "needs an API key"
        raise ConfigError(f"{url} {why}", field="api_key", fix=f"--api-key-file FILE, or set {ENVIRONMENT}")
    if models.status != 200:
        raise ConfigError(
            f"GET {url}/v1/models answered {models.status}: {models.body[:200].decode(errors='replace')}"
        )
    served = _walk(_json(models.body), "data", 0, "id")
    model = plan.model or (served if isinstance(served, str) else "")
    if not model:
        raise ConfigError(f"{url} tells no model name", field="model", fix="give it with --model")
    if plan.vocab:
        return model, Vocabulary.of_size(plan.vocab)
    told = await client.request("GET", f"{url}/model_info", headers=headers, timeout_s=10.0)
    size = _walk(_json(told.body), "vocab_size") if told.status == 200 else None
    return model, Vocabulary.of_size(size) if isinstance(size, int) and size > 1 else Vocabulary()


class _Ticker:
    """Progress: a bar on a terminal, elsewhere a line on stderr every `_LINE_EVERY_S` seconds."""

    def __init__(self, console: Console, label: str, total: int) -> None:
        self._label, self._total = label, total
        self._lines = not console.is_terminal
        self._num_done = 0
        self._said = time.monotonic()
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[failed]}"),
        )
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._progress.add_task(label, total=total, failed="")
        self._num_failed = 0

    def __enter__(self) -> _Ticker:
        self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()

    def tick(self, marks: Marks) -> None:
        self._num_failed += not marks.ok
        self._num_done += 1
        failed = f"{self._num_failed} failed" if self._num_failed else ""
        now = time.monotonic()
        if self._lines and now - self._said >= _LINE_EVERY_S:
            self._said = now
            print(f"{self._label}: {self._num_done} of {self._total} {failed}".rstrip(), file=sys.stderr)
        self._progress.update(self._task, advance=1, failed=failed)


def _facts(plan: Plan, url: str, model: str, seed: int) -> dict[str, Any]:
    lengths = f"{plan.input_len} in / {plan.output_len} out"
    return {
        "version": splitserve.__version__,
        "url": url,
        "model": model,
        "workload": f"{plan.trace.name}, at most {lengths}" if plan.trace else f"random, {lengths}",
        "seed": seed,
        "machine": f"{platform.machine()} {platform.system()}, {os.cpu_count()} cpus",
        "command": command_line(sys.argv, own=("--recorded",)),
        "started": _now(),
    }


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def _to_text(summaries: Sequence[Summary], facts: dict[str, Any]) -> str:
    found = {**facts, "results": [report.to_json(s) for s in summaries]}
    return msgspec.json.format(msgspec.json.encode(found), indent=2).decode() + "\n"


def _json(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except msgspec.DecodeError:
        return None


def _walk(found: Any, *path: str | int) -> Any:
    """found[path[0]][path[1]]..., or None where it does not exist."""
    for step in path:
        in_dict = isinstance(found, dict) and step in found
        in_list = isinstance(found, list) and isinstance(step, int) and step < len(found)
        if not (in_dict or in_list):
            return None
        found = found[step]
    return found
