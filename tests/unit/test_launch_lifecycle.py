"""The lifecycle, by histories: named ones with their actions, and random ones in a world of unruly processes."""

from __future__ import annotations

import random
import signal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitserve.config import DeploymentConfig
from splitserve.errors import InvariantError
from splitserve.launch.lifecycle import (
    Action,
    Exited,
    Finish,
    Kill,
    Lifecycle,
    Line,
    Overall,
    Phase,
    Probe,
    Probed,
    Restart,
    Signal,
    Spawn,
    Stop,
    Tell,
    Tick,
    describe_exit,
)

PAIR = [("prefill-0", "prefill", 0), ("decode-0", "decode", 0), ("router", "router", 1)]
TWO_DECODES = [*PAIR[:2], ("decode-1", "decode", 0), PAIR[2]]
CONFIG = DeploymentConfig(
    max_restarts=2, restart_window_s=60, ready_timeout_s=100, drain_s=10, kill_after_s=5
)


def ready(name: str) -> Line:
    return Line(name, {"ready": True, "url": f"http://{name}"})


def acts(actions: list[Action]) -> list[Action]:
    """Without what is only told."""
    return [a for a in actions if not isinstance(a, Tell)]


def told(actions: list[Action], kind: str) -> list[str]:
    return [f"{a.name} {a.text}".strip() for a in actions if isinstance(a, Tell) and a.kind == kind]


def up(children: list[tuple[str, str, int]] = PAIR, config: DeploymentConfig = CONFIG) -> Lifecycle:
    """A deployment that has just come up, at time 0."""
    life = Lifecycle(children, config)
    life.start(0.0)
    for name, _, _ in children:
        life.handle(ready(name), 0.0)
    life.handle(Probed(), 0.0)
    assert life.overall is Overall.UP
    return life


def test_engines_start_together_then_the_router_then_a_token_is_asked_for():
    life = Lifecycle(PAIR, CONFIG)
    assert life.start(0.0) == [Spawn("prefill-0"), Spawn("decode-0")]
    assert acts(life.handle(ready("decode-0"), 1.0)) == []
    assert acts(life.handle(ready("prefill-0"), 2.0)) == [Spawn("router")]
    assert acts(life.handle(ready("router"), 3.0)) == [Probe()]
    assert life.overall is Overall.STARTING
    assert told(life.handle(Probed(), 4.0), "up")
    assert life.overall is Overall.UP
    assert life.next_deadline() is None


def test_progress_is_kept_and_told():
    life = Lifecycle(PAIR, CONFIG)
    life.start(0.0)
    actions = life.handle(Line("decode-0", {"loading": "weights", "done": 0.4}), 1.0)
    assert actions == [Tell("loading", "decode-0", "weights")]
    assert life.children["decode-0"].done == 0.4
    assert life.handle(Line("decode-0", {"what": 1}), 1.0) == []


def test_a_stage_of_the_start_is_gone_when_the_start_is_over():
    life = up()
    for event in (Restart("decode-0"), Exited("decode-0", -9)):
        life.handle(event, 2.0)
        child = life.children["decode-0"]
        life.handle(Line("decode-0", {"loading": "first token", "done": 0.9}), 2.0)
        assert (child.loading == "first token") is (child.phase is Phase.STARTING), child.phase
    child.phase = Phase.STARTING
    life.handle(Line("decode-0", {"loading": "first token", "done": 0.9}), 3.0)
    assert child.loading == "first token"
    for phase in set(Phase) - {Phase.STARTING}:
        child.phase = phase
        assert child.loading == ""


@pytest.mark.parametrize(("code", "exit_code"), [(1, 1), (2, 2), (-9, 1), (0, 1)])
def test_an_exit_before_the_deployment_was_up_stops_it_at_once(code: int, exit_code: int):
    life = Lifecycle(PAIR, CONFIG)
    life.start(0.0)
    actions = life.handle(Exited("decode-0", code), 1.0)
    assert acts(actions) == [Signal("prefill-0", signal.SIGTERM)]
    assert acts(life.handle(Exited("prefill-0", 0), 1.1)) == [Finish(exit_code)]
    assert "decode-0" in life.why


def test_a_start_that_takes_too_long_says_who_was_late():
    life = Lifecycle(PAIR, CONFIG)
    life.start(0.0)
    life.handle(ready("prefill-0"), 1.0)
    life.handle(Line("decode-0", {"loading": "weights"}), 1.0)
    assert life.next_deadline() == 100.0
    actions = life.handle(Tick(), 100.0)
    assert "decode-0 (weights)" in life.why
    assert "prefill-0" not in life.why.replace("router", "")
    assert Signal("decode-0", signal.SIGTERM) in actions


def test_a_router_that_never_gets_a_token_is_told():
    life = Lifecycle(PAIR, CONFIG)
    life.start(0.0)
    for name, _, _ in PAIR:
        life.handle(ready(name), 1.0)
    life.handle(Tick(), 100.0)
    assert "no token came through the router" in life.why


def test_a_death_is_followed_by_a_restart_after_a_pause_that_grows():
    life = up()
    assert acts(life.handle(Exited("decode-0", -9), 10.0)) == []
    assert life.next_deadline() == 10.25
    assert life.handle(Tick(), 10.25) == [Spawn("decode-0")]
    life.handle(ready("decode-0"), 11.0)
    life.handle(Exited("decode-0", -9), 12.0)
    assert life.next_deadline() == 12.5
    assert life.overall is Overall.UP


def test_too_many_restarts_give_up_and_stop_everything():
    life = up()
    for t in (10.0, 20.0):
        life.handle(Exited("decode-0", 1), t)
        life.handle(Tick(), t + 5)
        life.handle(ready("decode-0"), t + 6)
    actions = life.handle(Exited("decode-0", 1), 30.0)
    assert told(actions, "gave_up") == ["decode-0 2 restarts within 60 s did not cure it"]
    assert acts(actions) == [Signal("router", signal.SIGTERM)]
    life.handle(Exited("router", 0), 31.0)
    assert acts(life.handle(Exited("prefill-0", 0), 32.0)) == [Finish(1)]
    assert "no decode is left" in life.why


def test_old_restarts_are_forgotten():
    life = up()
    for t in (100.0, 200.0, 300.0, 400.0):
        life.handle(Exited("decode-0", 1), t)
        life.handle(Tick(), t + 5)
        life.handle(ready("decode-0"), t + 6)
    assert life.overall is Overall.UP
    assert life.children["decode-0"].num_restarts == 4


def test_one_of_two_given_up_leaves_the_other_serving():
    life = up(TWO_DECODES, DeploymentConfig(max_restarts=0))
    actions = life.handle(Exited("decode-0", 1), 10.0)
    assert told(actions, "gave_up")
    assert acts(actions) == []
    assert life.overall is Overall.UP
    actions = life.handle(Exited("decode-1", 1), 11.0)
    assert acts(actions) == [Signal("router", signal.SIGTERM)]


def test_restart_off_or_wrong_settings_never_restart():
    for config, code, why in (
        (DeploymentConfig(restart=False), 1, "restart is off"),
        (CONFIG, 2, "settings"),
    ):
        life = up(config=config)
        assert any(why in text for text in told(life.handle(Exited("decode-0", code), 1.0), "gave_up"))


def test_stopping_lets_the_router_drain_before_the_engines_go():
    life = up()
    assert acts(life.handle(Stop("Ctrl-C", 130), 10.0)) == [Signal("router", signal.SIGTERM)]
    assert life.next_deadline() == 20.0
    drained = acts(life.handle(Exited("router", 0), 12.0))
    assert drained == [Signal("prefill-0", signal.SIGTERM), Signal("decode-0", signal.SIGTERM)]
    assert life.next_deadline() == 17.0
    assert acts(life.handle(Exited("decode-0", 0), 13.0)) == []
    assert acts(life.handle(Exited("prefill-0", 0), 13.0)) == [Finish(130)]
    life.check()


def test_what_does_not_stop_in_time_is_killed():
    life = up()
    life.handle(Stop("down"), 10.0)
    assert acts(life.handle(Tick(), 20.0)) == [Signal("prefill-0", 15), Signal("decode-0", 15)]
    actions = acts(life.handle(Tick(), 25.0))
    assert sorted(a.name for a in actions if isinstance(a, Signal) and a.number == 9) == sorted(life.children)
    for name in life.children:
        life.handle(Exited(name, -9), 25.1)
    assert life.overall is Overall.DOWN


def test_kill_waits_for_nobody():
    life = up()
    life.handle(Stop("Ctrl-C", 130), 10.0)
    actions = acts(life.handle(Kill("Ctrl-C again"), 10.1))
    assert actions == [Signal(name, signal.SIGKILL) for name in life.children]


def test_stop_before_the_router_was_started():
    life = Lifecycle(PAIR, CONFIG)
    life.start(0.0)
    actions = acts(life.handle(Stop("Ctrl-C", 130), 1.0))
    assert actions == [Signal("prefill-0", signal.SIGTERM), Signal("decode-0", signal.SIGTERM)]
    assert life.children["router"].phase is Phase.GONE


def test_an_operators_restart_is_not_a_death():
    life = up()
    assert life.handle(Restart("decode-0"), 1.0) == [Signal("decode-0", signal.SIGTERM)]
    actions = life.handle(Exited("decode-0", 0), 2.0)
    assert actions == [Spawn("decode-0")]
    assert life.children["decode-0"].restarts == []


def test_check_finds_a_start_without_a_deadline():
    life = Lifecycle(PAIR, CONFIG)
    life.start(0.0)
    life.children["decode-0"].deadline = None
    with pytest.raises(InvariantError, match="could wait for ever"):
        life.check()


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (0, "exited with code 0"),
        (-9, "was killed by SIGKILL"),
        (-11, "was killed by SIGSEGV"),
        (-99, "was killed by signal 99"),
    ],
)
def test_exits_in_words(code: int, text: str):
    assert describe_exit(code) == text


class World:
    """Processes that obey or not. Acts as the supervisor would and watches that what it is told makes sense."""

    def __init__(
        self, children: list[tuple[str, str, int]], config: DeploymentConfig, rng: random.Random
    ) -> None:
        self.life = Lifecycle(children, config)
        self.rng = rng
        self.now = 0.0
        self.alive: dict[str, bool] = {}  # name: obeys SIGTERM
        self.probing = False
        self.finished: int | None = None
        self.act(self.life.start(0.0))

    def act(self, actions: list[Action]) -> None:
        dying = []
        for action in actions:
            assert self.finished is None, f"{action} after Finish"
            match action:
                case Spawn(name):
                    assert name not in self.alive, f"{name} started twice"
                    assert self.life.overall in (Overall.STARTING, Overall.UP)
                    self.alive[name] = self.rng.random() < 0.7
                case Signal(name, number):
                    assert name in self.alive, f"signal {number} to {name}, which is gone"
                    if number == signal.SIGKILL or self.alive[name]:
                        dying.append((name, -int(number)))
                case Probe():
                    self.probing = True
                case Finish(code):
                    assert not self.alive, f"finished with {sorted(self.alive)} alive"
                    self.finished = code
        self.life.check()
        for name, code in dying:
            self.exit(name, code)

    def exit(self, name: str, code: int) -> None:
        if name in self.alive:
            del self.alive[name]
            self.feed(Exited(name, code))

    def feed(self, event: Any) -> None:
        self.act(self.life.handle(event, self.now))

    def step(self) -> None:
        """Something happens; what, is chosen at random."""
        some = self.rng.choice(sorted(self.alive)) if self.alive else ""
        router = [c for c in self.life.children.values() if c.stage == 1 and c.name in self.alive]
        if router and self.life.overall is Overall.STARTING:
            assert all(c.phase is Phase.READY for c in self.life.children.values() if c.stage == 0)
        match self.rng.randrange(10):
            case 0 | 1 | 2 | 3 if some:
                self.feed(ready(some))
            case 4 if some:
                self.exit(some, self.rng.choice([0, 1, -9, -11]))
            case 5 if self.probing and self.life.overall is Overall.STARTING:
                self.feed(Probed())
            case 6 if some:
                self.feed(Restart(some))
            case 7 | 8:
                self.pass_time()
            case _:
                self.now += self.rng.random()

    def pass_time(self) -> None:
        at = self.life.next_deadline()
        self.now = max(self.now, at) if at is not None else self.now + 1.0
        if at is not None:
            self.feed(Tick())


@settings(max_examples=300)
@given(
    st.integers(0, 2**32), st.booleans(), st.integers(0, 40), st.sampled_from(["stop", "kill", "stop, kill"])
)
def test_any_history_ends_in_bounded_time_with_nothing_alive(seed: int, more: bool, steps: int, end: str):
    world = World(TWO_DECODES if more else PAIR, CONFIG, random.Random(seed))
    for _ in range(steps):
        if world.finished is None:
            world.step()
    asked = world.now
    if world.finished is None and "stop" in end:
        world.feed(Stop("Ctrl-C", 130))
    if world.finished is None and "kill" in end:
        world.feed(Kill("now"))
        assert world.finished is not None
    for _ in range(20):
        if world.finished is None:
            world.pass_time()
    assert world.finished is not None
    assert world.now <= asked + CONFIG.drain_s + 2 * CONFIG.kill_after_s
