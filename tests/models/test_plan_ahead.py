"""The loop that plans step n + 1 before step n is applied gives the tokens of the loop that does not.

Real loop, scheduler, runner and a tiny model; only the link to the server is a list.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq

from splitserve import wire
from splitserve.dist.group import SoloGroup
from splitserve.engine.channel import Ranks
from splitserve.engine.constraint import Constraints
from splitserve.engine.controls import Controls
from splitserve.engine.lifetimes import Lifetimes
from splitserve.engine.limits import Limits
from splitserve.engine.loop import Loop
from splitserve.engine.runner import Runner
from splitserve.engine.scheduler import Scheduler
from splitserve.kv.cache import Cache
from splitserve.models import registry
from splitserve.models.read import read_config
from splitserve.text import tokenizer
from splitserve.text.grammar import Vocabulary
from splitserve.types import Grammar, GrammarKind, SamplingParams
from splitserve.weights.locate import locate
from tests.tiny import make_pool
from tests.tiny_chat import write_chat_checkpoint

PAGE = 8
NUM_PAGES = 40


class Link:
    """The server's end as two lists."""

    def __init__(self) -> None:
        self.socket = zmq.Context.instance().socket(zmq.PAIR)
        self.inbox: list[Any] = []
        self.sent: list[Any] = []

    def receive(self) -> list[Any]:
        taken, self.inbox = self.inbox, []
        return taken

    def send(self, message: Any) -> None:
        self.sent.append(message)


class Rig:
    def __init__(self, path: Path, *, plan_ahead: bool) -> None:
        source = locate(path)
        cfg = read_config(source)
        model = registry.build(cfg, SoloGroup(), dtype="f32")
        model.load(source)
        pool = make_pool(cfg, num_pages=NUM_PAGES, page_tokens=PAGE)
        cache = Cache(num_pages=NUM_PAGES, page_tokens=PAGE, num_slots=0, prefix=True)
        self.scheduler = Scheduler(cache, Limits(max_len=NUM_PAGES * PAGE, max_seqs=6, step_tokens=32))
        runner = Runner(
            model,
            pool,
            page_tokens=PAGE,
            tp=SoloGroup(),
            device=torch.device("cpu"),
            between_layers=lambda: None,
            constraints=Constraints(lambda: Vocabulary(tokenizer.load(path), cfg.vocab)),
        )
        controls = Controls(self.scheduler, pool, transfers=None, faults=None, lifetimes=Lifetimes())
        self.link = Link()
        self.loop = Loop(
            self.link,  # type: ignore[arg-type]
            self.scheduler,
            runner=runner,
            ranks=Ranks("", "x", 1),
            transfers=None,
            controls=controls,
        )
        self.loop.plan_ahead = plan_ahead

    def answers(self, asks: list[wire.Generate]) -> dict[str, tuple[list[int], str]]:
        """(tokens, how it ended) of each request; a new one comes every third turn."""
        asks = list(asks)
        turns = 0
        while self.loop.turn() or asks or self.scheduler.waiting or self.scheduler.running:
            if asks and turns % 3 == 0:
                self.link.inbox.append(asks.pop(0))
            turns += 1
            self.scheduler.check()
            assert turns < 3000
        self.scheduler.check()
        found: dict[str, tuple[list[int], str]] = {}
        for message in self.link.sent:
            if isinstance(message, wire.Failed):
                found[message.rid] = ([], message.code)
            for event in message.events if isinstance(message, wire.Outputs) else ():
                tokens, end = found.get(event.rid, ([], ""))
                found[event.rid] = ([*tokens, *event.tokens], str(event.finish or end))
        return found


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_checkpoint(tmp_path_factory.mktemp("m") / "tiny")


def asks() -> list[wire.Generate]:
    rng = random.Random(5)
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "seed": 3},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4},
        {"temperature": 0.8, "seed": 9, "frequency_penalty": 1.0, "top_p": 0.9},
        {"stop_token_ids": tuple(range(6, 60))},
        {"min_tokens": 6, "stop_token_ids": tuple(range(6, 200))},
        {"grammar": Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"type": "integer", "maximum": 99999}))},
        {"max_tokens": 1},
    ]
    made = []
    for i in range(24):
        sampling = {"temperature": 0.0, "max_tokens": rng.randrange(2, 24), **kinds[i % len(kinds)]}
        prompt = [rng.randrange(6, 262) for _ in range(rng.randrange(1, 50))]
        made.append(wire.Generate(f"r{i}", prompt, len(prompt), SamplingParams(**sampling)))
    return made


def test_planning_ahead_changes_no_token_and_loses_no_page(path: Path) -> None:
    plain, ahead = (Rig(path, plan_ahead=p) for p in (False, True))
    want, got = plain.answers(asks()), ahead.answers(asks())
    assert got == want
    assert len(want) == 24
    assert sum(len(tokens) for tokens, _ in want.values()) > 100
    free = [r.scheduler.cache.num_free + r.scheduler.cache.num_evictable for r in (plain, ahead)]
    assert free == [NUM_PAGES, NUM_PAGES]


def test_a_step_is_launched_before_the_last_one_is_applied(path: Path) -> None:
    rig = Rig(path, plan_ahead=True)
    in_flight = []
    apply = rig.scheduler.apply

    def watched(result: Any) -> None:
        in_flight.append(len(rig.scheduler._steps))
        apply(result)

    rig.scheduler.apply = watched  # type: ignore[method-assign]
    rig.answers(asks()[:4])
    assert max(in_flight) == 2
