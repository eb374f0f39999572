"""An engine that computes nothing: it speaks wire messages over ZeroMQ and answers from a script.

In a test's own process it is a thread (`FakeEngine`) whose received messages can be looked at; as a process
(`python tests/fake_engine.py --config FILE --alive-fd N`) it stands where the real rank stands. There a prompt's text
may hold an order: "DIE" kills it in mid-answer, "SLOW" answers after half a second, "HANG" never.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import zmq
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from splitserve import wire
from splitserve.types import FinishReason, TokenEvent, TokenLogprobs

END, SYSTEM, USER, ASSISTANT = 256, 257, 258, 259
VOCAB = 260
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

Item = TokenEvent | wire.Failed
Script = Callable[[wire.Generate], Sequence[Item]]


def save_tokenizer(path: Path) -> Path:
    """A checkpoint directory whose tokenizer has one token for each byte: token ids are UTF-8 bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    vocab = {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
    fast = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    names = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
    fast.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in names])
    path.mkdir(parents=True, exist_ok=True)
    fast.save(str(path / "tokenizer.json"))
    config = {"eos_token": "<|end|>", "chat_template": TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "config.json").write_text("{}")
    return path


def say(text: str, *, end: bool = True, best: int = 2) -> Script:
    """Answer every request with the bytes of `text`, one event each, then the end token; honours max_tokens."""

    def script(request: wire.Generate) -> list[Item]:
        wanted, sampling = list(text.encode()) + ([END] if end else []), request.sampling
        prompt = tuple(
            None if i == 0 else logprobs_of(t, best)
            for i, t in enumerate(request.tokens[: request.num_prompt])
        )
        events: list[Item] = []
        begun = len(request.tokens) - request.num_prompt  # emitted by another engine
        limit = begun + 1 if request.half == "prefill" else sampling.max_tokens
        for i, token in list(enumerate(wanted[:limit]))[begun:]:
            stop = token in sampling.stop_token_ids and i + 1 >= sampling.min_tokens
            last = stop or i + 1 == limit
            events.append(
                TokenEvent(
                    request.rid,
                    tokens=(token,),
                    logprobs=(logprobs_of(token, sampling.logprobs),)
                    if sampling.logprobs is not None
                    else (),
                    finish=(FinishReason.STOP if stop else FinishReason.LENGTH) if last else None,
                    matched_stop=token if stop else None,
                    num_cached=3 if i == begun else 0,
                    prompt_logprobs=prompt if i == begun and sampling.prompt_logprobs is not None else (),
                )
            )
            if stop:
                break
        return _leaving(events[0]) if request.half == "prefill" else events

    return script


def _leaving(event: TokenEvent) -> list[Item]:
    """A prefill half tells its token at once, and its end when its rows have left."""
    return [msgspec.structs.replace(event, finish=None), TokenEvent(event.rid, finish=event.finish)]


def logprobs_of(token: int, best: int | None) -> TokenLogprobs:
    """Made up, but a function of the token: -token/100, then the tokens above it."""
    ids = tuple((token + i) % 256 for i in range(best or 0))
    return TokenLogprobs(-token / 100, ids, tuple(-token / 100 - i for i in range(len(ids))))


class FakeEngine:
    """Runs in a thread between `start` and `stop`. Each turn sends the next item of every open request.

    `gate` holds items back while it is cleared.
    """

    def __init__(self, endpoint: str, script: Script, *, hello: wire.Hello | None = None) -> None:
        self.endpoint = endpoint
        self.script = script
        self.hello = hello or wire.Hello(wire.PROTOCOL, 512, {"vocab_size": VOCAB, "model": "bytes"})
        self.generates: list[wire.Generate] = []
        self.aborts: list[wire.Abort] = []
        self.controls: list[wire.Control] = []
        self.replies: dict[str, wire.Reply] = {}
        self.outbox: list[wire.ToServer] = []
        self.gate = threading.Event()
        self.gate.set()
        self.deaf = threading.Event()
        self.open: dict[str, list[Item]] = {}
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> FakeEngine:
        self._thread = threading.Thread(target=self.run, daemon=True)
        self._thread.start()
        return self

    def stop(self) -> None:
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(5)

    def run(self, alive_fd: int | None = None) -> None:
        with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
            socket.setsockopt(zmq.LINGER, 200)
            socket.connect(self.endpoint)
            decoder = wire.decoder(wire.ToEngine)
            socket.send(wire.encode(wire.Loading("weights", 0.5)))
            socket.send(wire.encode(self.hello))
            while not self._stopping.is_set():
                if alive_fd is not None and select.select([alive_fd], [], [], 0)[0]:
                    return
                if socket.poll(1 if self.open or self.outbox else 10) and not self.deaf.is_set():
                    for raw in _drain(socket):
                        self._take(decoder.decode(raw), socket)
                self._turn(socket)

    def _take(self, message: wire.ToEngine, socket: zmq.Socket) -> None:
        match message:
            case wire.Generate():
                self.open[message.rid] = list(self.script(message))
                self.generates.append(message)
            case wire.Abort():
                self.open.pop(message.rid, None)
                self.aborts.append(message)
            case wire.Control():
                self.controls.append(message)
                reply = self.replies.get(message.op, wire.Reply(0, True, {"op": message.op}))
                socket.send(wire.encode(wire.Reply(message.id, reply.ok, reply.body)))

    def _turn(self, socket: zmq.Socket) -> None:
        while self.outbox:
            socket.send(wire.encode(self.outbox.pop(0)))
        if not self.gate.is_set():
            return
        for rid, items in list(self.open.items()):
            if not items:
                continue
            item = items.pop(0)
            ended = isinstance(item, wire.Failed) or item.finish is not None
            if ended:
                self.open.pop(rid, None)
            socket.send(wire.encode(item if isinstance(item, wire.Failed) else wire.Outputs((item,))))


def _drain(socket: zmq.Socket) -> list[bytes]:
    found = []
    while True:
        try:
            found.append(socket.recv(zmq.NOBLOCK))
        except zmq.Again:
            return found


def until(condition: Callable[[], bool], *, within_s: float = 5.0) -> None:
    """Wait, in a thread that may block, until something is so."""
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, "it did not come to pass in time"
        time.sleep(0.002)


# ------------------------------------------------------------------ as a process


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True)
    parser.add_argument("--alive-fd", type=int, required=True)
    args = parser.parse_args()
    config = json.loads(Path(args.config).read_text())
    if os.environ.get("FAKE_ENGINE_REFUSES"):
        return _refuse(config["server_endpoint"])
    facts = {"vocab_size": VOCAB, "bootstrap_host": "127.0.0.1", "bootstrap_port": 4567, "config": config}
    hello = wire.Hello(wire.PROTOCOL, 512, facts)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    engine = FakeEngine(config["server_endpoint"], lambda request: _ordered(engine, request), hello=hello)
    engine.run(args.alive_fd)
    return 0


def _ordered(engine: FakeEngine, request: wire.Generate) -> Sequence[Item]:
    text = bytes(t for t in request.tokens if t < 256).decode("utf-8", "replace")
    if "HANG" in text:
        return []
    if "SLOW" in text:
        late = list(say("late")(request))
        threading.Timer(0.5, lambda: engine.open.get(request.rid, []).extend(late)).start()
        return []
    if "DIE" in text:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGKILL)).start()
        return say("dying", end=False)(request)[:-1]
    said = list(say("Hello there")(request))
    if (
        isinstance(said[-1], TokenEvent) and said[-1].finish is None
    ):  # no stop token, and more is wanted than there is
        said[-1] = msgspec.structs.replace(said[-1], finish=FinishReason.LENGTH)
    return said


def _refuse(endpoint: str) -> int:
    with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
        socket.setsockopt(zmq.LINGER, 500)
        socket.connect(endpoint)
        socket.send(wire.encode(wire.Failed("", "capacity_error", 500, "1 page needs 9 MB, 3 are free")))
    return 2


if __name__ == "__main__":
    sys.exit(main())
