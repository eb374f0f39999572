"""The deployments for four and eight GPUs, and the page that benchmarks/gpu makes of what was measured on them."""

from __future__ import annotations

import io
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.gpu import page, split
from splitserve.compare.arms import arms
from splitserve.launch import topology
from splitserve.launch.deployment import load
from splitserve.launch.placement import place

ROOT = Path(__file__).parents[2]
BOX = topology.load(ROOT / "tests/fixtures/topologies/rtx-pro-6000-x8.json")


@pytest.mark.parametrize(("box", "tp", "num_gpus"), [("x4", 2, 4), ("x8", 4, 8)])
def test_prefill_and_decode_take_half_of_the_gpus_each(box: str, tp: int, num_gpus: int) -> None:
    deployment = load(ROOT / split.FILES[box], environ={})
    here = replace(BOX, gpus=BOX.gpus[:num_gpus])
    by_role = {s.role: s for s in place(here, deployment)}
    prefill, decode = by_role["prefill"], by_role["decode"]
    assert (prefill.tp, decode.tp) == (tp, tp)
    assert sorted((*prefill.gpus, *decode.gpus)) == list(range(num_gpus))
    assert not set(prefill.cpus) & set(decode.cpus)
    rivals = {
        a.name: tomllib.loads(a.text)["unified"] for a in arms(deployment, here, ("replicas", "single"))
    }
    assert (rivals["replicas"]["replicas"], rivals["replicas"]["tp"]) == (2, tp)
    assert (rivals["single"]["replicas"], rivals["single"]["tp"]) == (1, 2 * tp)


def sent(*spans: tuple[float, float], num_bytes: int = 3_000_000_000) -> dict[str, Any]:
    chunks = [{"computed": a, "posted": a, "written": b} for a, b in spans]
    return {"ok": True, "bytes": num_bytes, "descriptors": 4, "lanes": ["cuda_ipc/0"], "chunks": chunks}


def test_a_handoff_is_rated_by_the_time_in_which_it_moved() -> None:
    """Not by what was computed between its chunks, and chunks under way at once count once."""
    assert page.rate_of(sent((1.0, 2.0), (5.0, 5.5))) == pytest.approx(2.0)
    assert page.rate_of(sent((1.0, 2.0), (1.5, 2.5))) == pytest.approx(2.0)
    assert page.rate_of(sent((0.0, 0.0))) == 0.0
    timed = sent((1.0, 2.0), (5.0, 5.5))
    timed["chunks"] = [c | {"moving": 0.5} for c in timed["chunks"]]  # what the ports' own clocks say
    assert page.rate_of(timed) == pytest.approx(3.0)


def shown(stages: dict[str, Any]) -> str:
    console = Console(file=io.StringIO(), width=140)
    page.show(console, stages)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_page_shows_what_there_is() -> None:
    assert "nothing has been measured" in shown({})
    facts = {"box": "x8", "tiny": False, "commit": "abc", "host": {"cpu": "cpu"}, "date": "today"}
    link = {"source": 0, "target": 0, "alone": {"1048576": 2.0, "67108864": 9.5}, "lane": "cuda_ipc/0"}
    links = [{**link, "together": 0.0}, {**link, "target": 1, "together": 4.25}]
    finding = {"kind": "halved", "text": "prefill rank 0 to decode rank 1", "fix": ""}
    fabric = {"fabric": {"links": links, "memcpy": 10.0, "tcp": 1.0}, "verdict": {"findings": [finding]}}
    process = {
        "name": "prefill-0",
        "phase": "ready",
        "loading": "",
        "pid": 7,
        "cpus": [0, 1],
        "memory": "bind:0",
    }
    process |= {"gpus": [0, 1], "restarts": 0, "ports": {"http": 9000}, "misbound": ["rank 1 runs on cpu 5"]}
    records = [{"sent": sent((1.0, 2.0)), "received": {"ok": True}}] * 2
    handoff = {"ready_s": 60.0, "processes": [process], "lengths": {"256": records, "1024": []}}
    text = shown({"fabric": {**facts, "found": fabric}, "handoff": {**facts, "found": handoff}})
    for words in (
        "commit abc",
        "9.50 (4.25)",
        "halved: prefill rank 0",
        "rank 1 runs on cpu 5",
        "3.00 (3.00-3.00)",
    ):
        assert words in text, words
