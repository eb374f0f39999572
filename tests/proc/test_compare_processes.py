"""compare with real processes: each planted slowness is named for what it is."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator

import pytest

from splitserve.bench.client import LoadClient
from splitserve.bench.workload import Vocabulary, random_asks
from splitserve.compare.measure import Shape, Target
from splitserve.net.client import Client
from splitserve.plan.verdict import Bound, Verdict, judge
from tests.proc.real import Deployment
from tests.tiny_chat import write_chat_checkpoint

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    model = write_chat_checkpoint(tmp_path_factory.mktemp("model") / "tiny")
    deployment = Deployment(model, name="c", transport="local", deadline_s=30.0)
    deployment.up()
    yield deployment
    deployment.close()


async def measured(pair: Deployment, throttles: dict[str, float], *, num_output: int) -> Verdict:
    """The verdict on eight requests, four at a time, under these throttles in ms."""
    async with Client() as client:
        target = Target(client, pair.state())
        await target.throttle({"slow_decode": 0, "slow_prefill": 0, "slow_link": 0, **throttles})
        asks = random_asks(
            8,
            input_len=64,
            output_len=num_output,
            rng=random.Random(time.time()),
            vocabulary=Vocabulary(6, 262),
        )
        load = LoadClient(client, target.router, model="tiny", now=time.perf_counter, timeout_s=60.0)
        found = await target.measure(load, asks, Shape(8, concurrency=4), slo=None)
        assert not found.summary.num_failed, found.summary.errors
        assert len(found.run.lives) == 8
        return judge(found.run)


@pytest.mark.parametrize(
    ("throttles", "num_output", "bound", "words"),
    [
        ({"slow_decode": 94.0}, 16, Bound.DECODE, "decode-bound, the split cannot help"),
        ({"slow_prefill": 6.0}, 2, Bound.PREFILL, "prefill-bound"),
        ({"slow_link": 250.0}, 2, Bound.TRANSFER, "transfer"),
    ],
)
def test_what_is_slow_is_named(
    pair: Deployment, throttles: dict[str, float], num_output: int, bound: Bound, words: str
) -> None:
    verdict = asyncio.run(measured(pair, throttles, num_output=num_output))
    assert verdict.bound is bound, verdict
    assert verdict.sentence.startswith(words)
