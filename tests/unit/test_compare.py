"""compare without processes: three files of the same devices, the tuned chunk, the report; and bench's page."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import tomllib
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from typing import Any

import pytest
from rich.console import Console

from splitserve.bench import page
from splitserve.bench.metrics import Marks, summarize
from splitserve.compare import report
from splitserve.compare.arms import Arm, arms
from splitserve.compare.main import Comparison, Found, Study, _parser, study_of
from splitserve.compare.measure import Shape, Taken, Target, merged
from splitserve.errors import ConfigError
from splitserve.launch.deployment import Deployment, parse
from splitserve.launch.placement import place
from splitserve.launch.topology import Core, Gpu, Node, Topology
from splitserve.net.client import Client
from splitserve.net.http import Request, Responder, serve
from splitserve.plan.verdict import Engine, Run


def machine(cores: int, gpus: int = 0) -> Topology:
    return Topology(
        cores=tuple(Core(0, 0, i, (i,)) for i in range(cores)),
        nodes=(Node(0, 2**34, 2**34),),
        gpus=tuple(Gpu(i, "g", f"u{i}", 2**36, 2**36, f"{i}", 0) for i in range(gpus)),
        cpu_quota=0.0,
        memory_total=2**34,
        memory_free=2**34,
        shm_free=2**30,
    )


def deployment(**tables: Any) -> Deployment:
    base = {"deployment": {"name": "d", "model": "m"}, "prefill": {}, "decode": {}}
    return parse({**base, **tables}, "file d.toml", environ={})


def by_name(found: list[Arm]) -> dict[str, dict[str, Any]]:
    return {a.name: tomllib.loads(a.text) for a in found}


def test_all_arms_compute_on_the_same_cpus_and_each_file_can_be_placed() -> None:
    found = arms(
        deployment(engine={"num_pages": 100, "max_seqs": 8, "dtype": "f32", "threads": 1}), machine(2)
    )
    files = by_name(found)
    assert files["split"]["prefill"]["cpus"] == [0]
    assert files["split"]["decode"]["cpus"] == [1]
    assert files["replicas"]["unified"]["replicas"] == 2
    single = files["single"]["unified"]
    assert (single["replicas"], single["threads"], single["num_pages"], single["max_seqs"]) == (1, 2, 200, 16)
    assert {a.num_devices for a in found} == {2}
    for arm in found:
        again = parse(tomllib.loads(arm.text), "file again.toml", environ={})
        specs = [s for s in place(machine(2), again) if s.role != "router"]
        assert sorted(c for s in specs for c in s.cpus) == [0, 1], arm.name
        assert {g.engine.dtype for g in again.groups} == {"f32"}


def test_gpus_are_counted_as_ranks_and_the_single_engine_spans_them() -> None:
    split = deployment(engine={"device": "cuda", "tp": 4, "memory_mb": 1000, "max_seqs": 8})
    found = arms(split, machine(16, gpus=8))
    files = by_name(found)
    assert files["replicas"]["unified"]["replicas"] == 2
    assert files["replicas"]["unified"]["tp"] == 4
    single = files["single"]["unified"]
    assert (single["tp"], single["memory_mb"], single["max_seqs"]) == (8, 1000, 16)
    assert {a.num_devices for a in found} == {8}


def test_what_cannot_be_compared_is_told() -> None:
    with pytest.raises(ConfigError, match="no pair"):
        arms(parse({"deployment": {"model": "m"}, "unified": {}}, "file u.toml", environ={}), machine(2))
    with pytest.raises(ConfigError, match="no arm 'quad'"):
        arms(deployment(), machine(2), ("quad",))
    uneven = deployment(engine={"device": "cuda"}, prefill={"tp": 1}, decode={"tp": 2})
    with pytest.raises(ConfigError, match="3 devices make no whole number"):
        arms(uneven, machine(4, gpus=3))
    assert len(arms(uneven, machine(4, gpus=3), ("split", "single"))) == 2


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--throttle", "slow_gpu=3"], "slow_gpu"),
        (["--throttle", "slow_link"], "slow_link"),
        (["--repeats", "0"], "at least 1"),
        (["--num", "0"], "at least 1"),
        (["--slo-ttft-ms", "5"], "two limits"),
        (["--chunks", "0"], "chunks"),
        (["--concurrency", "0"], "concurrency"),
        (["--rate", "nan"], "rate"),
    ],
)
def test_words_that_make_no_study(words: list[str], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        study_of(_parser().parse_args(["f.toml", *words]))


def taken(rate: float, *, failed: int = 0) -> Taken:
    """One measurement of `rate` output tokens a second."""
    marks = []
    for i in range(4):
        ok = i >= failed
        marks.append(
            Marks(
                10,
                11,
                0.0,
                0.1 if ok else -1.0,
                1.1 if ok else -1.0,
                [0.1] * 10,
                11,
                10,
                11,
                "" if ok else "no",
            )
        )
    summary = summarize(marks, duration_s=44 / rate, concurrency=4)
    engines = (
        Engine("prefill", {"prompt_step_s": 0.1}),
        Engine("decode", {"decode_step_s": 0.9, "decode_steps": 9, "decode_rows": 9}),
    )
    return Taken(summary, Run(1.0, engines))


class Scripted(Comparison):
    """A comparison whose measurements are given: (arm, chunk) -> output rate."""

    def __init__(self, study: Study, rates: dict[tuple[str, int], float], **more: Any) -> None:
        super().__init__(study, **{"say": lambda _: None, **more})
        self.rates = rates
        self.asked: list[tuple[str, int, str]] = []

    async def _take(self, arm: Arm, chunk: int, shapes: Sequence[Shape], *, seed: str) -> list[Taken]:
        self.asked.append((arm.name, chunk, seed))
        return [taken(self.rates[arm.name, chunk]) for _ in shapes]


def study(path: Any, **changes: Any) -> Study:
    file = path / "d.toml"
    file.write_text('[deployment]\nmodel = "m"\n[engine]\ndevice = "cpu"\n[prefill]\n[decode]\n')
    return Study(str(file), (Shape(4, concurrency=4),), **{"chunks": (32, 64), "repeats": 3, **changes})


RATES = {
    ("split", 32): 100.0,
    ("split", 64): 120.0,
    ("replicas", 32): 110.0,
    ("replicas", 64): 90.0,
    ("single", 32): 50.0,
    ("single", 64): 60.0,
}


def test_each_arm_is_measured_at_its_own_best_chunk_in_changing_order(tmp_path: Any) -> None:
    one = Scripted(study(tmp_path, repeats=8), RATES)
    found = asyncio.run(one.run())
    assert found.chunks == {"split": 64, "replicas": 32, "single": 64}
    assert found.tuning["split"] == pytest.approx({32: 100.0, 64: 120.0})
    rounds = [tuple(found.order[i : i + 3]) for i in range(0, 24, 3)]
    assert all(sorted(r) == ["replicas", "single", "split"] for r in rounds)
    assert len(set(rounds)) > 1
    measured = one.asked[6:]
    for repeat in range(8):  # the same prompts for all arms of a repeat, other ones for the next
        assert len({seed for _, _, seed in measured[3 * repeat : 3 * repeat + 3]}) == 1
    assert len({seed for _, _, seed in measured}) == 8
    assert [len(t[0]) for t in found.taken.values()] == [8, 8, 8]


def test_how_much_there_is_to_do_is_said_first_and_how_long_after_the_first_start(tmp_path: Any) -> None:
    said: list[str] = []
    clock = itertools.count(0, 60)  # a minute between any two looks: each start of four requests takes one
    one = Scripted(study(tmp_path), RATES, say=said.append, now=lambda: float(next(clock)))
    asyncio.run(one.run())
    assert said[0].startswith(
        "15 starts: 6 to tune, of 4 requests each; 9 to measure, of 4 (c=4) requests each"
    )
    assert "256 tokens in, 256 out" in said[0]
    assert said[1].startswith("tuning ")
    assert said[2] == "about 14 min left"
    assert [text for text in said if text.endswith(" left")][-1] == "about 60 s left"
    alone: list[str] = []
    once = Scripted(study(tmp_path, chunks=(32,), repeats=1), RATES, say=alone.append)
    asyncio.run(once.run())
    assert alone[0].startswith("3 starts: 3 to measure, of 4 (c=4) requests each")


def results(tmp_path: Any, **changes: Any) -> dict[str, Any]:
    asked = study(tmp_path, **changes)
    return report.results(asked, asyncio.run(Scripted(asked, RATES).run()))


def test_the_split_is_judged_against_the_best_rival(tmp_path: Any) -> None:
    found = results(tmp_path)
    verdict = found["loads"][0]["verdict"]
    throughput = next(g for g in verdict["gains"] if g["name"] == "throughput")
    assert throughput["ratio"] == pytest.approx(120 / 110)
    assert throughput["clear"]
    assert verdict["pays"] is True
    assert found["loads"][0]["arms"]["single"]["per_device"] == pytest.approx(
        60 / found["arms"]["single"]["num_devices"]
    )
    assert json.loads(report.to_json(found))["loads"][0]["verdict"]["bound"] == "decode-bound"
    assert found["num_failed"] == 0


def test_one_repeat_gives_no_answer_and_no_split_no_verdict(tmp_path: Any) -> None:
    assert results(tmp_path, repeats=1)["loads"][0]["verdict"]["pays"] is None
    assert results(tmp_path, arms=("replicas",))["loads"][0]["verdict"] is None


def test_failures_are_counted(tmp_path: Any) -> None:
    asked = study(tmp_path)
    found = Found([a for a in asyncio.run(Scripted(asked, RATES).run()).arms if a.name == "split"])
    found.chunks["split"] = 32
    found.taken["split"] = [[taken(100.0), taken(100.0, failed=3)]]
    assert report.results(asked, found)["num_failed"] == 3


def test_the_report_is_whole_at_80_columns(tmp_path: Any) -> None:
    """Large figures with a large spread, as two busy cores give them."""
    found = results(tmp_path)
    for arm in found["loads"][0]["arms"].values():
        for figure in arm["figures"].values():
            figure.update(median=18884.4, low=18684.0, high=19084.0)
    told = io.StringIO()
    report.print_report(Console(file=told, width=80), found)
    lines = told.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert (
        next(line for line in lines if line.startswith("TTFT p50, ms")).split()[3:] == ["18884", "±200"] * 3
    )
    assert any(line.split()[-3:] == ["split", "replicas", "single"] for line in lines)
    assert "throughput 1.09 times that of replicas (better)" in " ".join(lines)


def parts_of(html: str) -> list[ET.Element]:
    """The plots of a page, each read as XML."""
    return [ET.fromstring(p.split("</svg>")[0].join(("<svg", "</svg>"))) for p in html.split("<svg")[1:]]


def test_the_page_draws_every_figure_and_needs_nothing_else(tmp_path: Any) -> None:
    found = results(tmp_path)
    found["file"] = "<script>alert(1)</script>"
    html = report.to_html(found)
    assert "<script" not in html
    assert "https://" not in html
    assert "http://" not in html.replace("http://127", "")
    plots = parts_of(html)
    assert len(plots) == 4  # throughput, TTFT, TPOT, ITL; goodput only with limits
    assert len(plots[0].findall("rect")) == 3 + 3  # a bar and a legend's square for each arm


def test_bars_stand_in_proportion_and_lines_reach_their_ends() -> None:
    drawn = parts_of(
        page.bars("t", "ms", [("c=1", {"a": page.Bar(50, 40, 60), "b": page.Bar(100, 100, 100)})])
    )[0]
    heights = [float(r.get("height", "0")) for r in drawn.findall("rect") if r.find("title") is not None]
    assert heights[1] == pytest.approx(2 * heights[0], abs=0.2)
    assert parts_of(page.bars("none", "", []))
    (line,) = parts_of(page.lines("t", "ms", {"a": [(0, 0), (2, 4)]}, x_unit="s"))[0].findall("polyline")
    (x0, _), (x1, _) = [map(float, p.split(",")) for p in str(line.get("points")).split()]
    assert (x0, x1) == (page.LEFT, page.WIDTH - page.RIGHT)


def test_repeats_are_added_up_engine_by_engine() -> None:
    both = merged([taken(100.0).run, taken(50.0).run])
    assert both.duration_s == 2.0
    assert [e.role for e in both.engines] == ["prefill", "decode"]
    assert both.engines[1].sums["decode_steps"] == 18
    assert both.busy("decode") == pytest.approx(0.9)


def test_an_arm_is_asked_with_the_keys_of_its_file(tmp_path: Any) -> None:
    """Every call of a comparison to an engine that wants a key."""
    (tmp_path / "keys").write_text("inner\n")
    seen: list[Any] = []

    def app(req: Request, res: Responder) -> None:
        seen.append(req.headers.get("authorization"))
        res.send_json(200, {})

    async def run() -> None:
        server = await serve(app, host="127.0.0.1", port=0)
        url = f"http://127.0.0.1:{server.port}"
        processes = [{"role": r, "url": url} for r in ("router", "prefill")]
        async with Client() as client:
            for keys in ({}, {"engine_key_file": str(tmp_path / "keys")}):
                await Target(client, {"processes": processes, **keys}).throttle({"slow": 1.0})
        await server.close()

    asyncio.run(run())
    assert seen == [None, "Bearer inner"]
