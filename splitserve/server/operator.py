"""Every endpoint that makes no tokens for a client: health, figures, descriptions, tokenizing, operator's calls.

Paths and shapes are those that routers, Prometheus and benchmark tools of SGLang and vLLM ask for; see docs/api.md.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from splitserve import __version__, log
from splitserve.errors import NotFound, RequestError, SplitserveError, by_code
from splitserve.net.request import Request
from splitserve.net.responder import Responder
from splitserve.types import Role, SamplingParams
from splitserve.wire import Generate

from . import metrics, params
from .body import read_object, typed
from .engine_link import Inbox
from .openai import ChatBody
from .service import Service

_log = log.get(__name__)

Route = Callable[[Request, Responder], Awaitable[None] | None]

PROBE_S = 30.0
"""Longest wait for the one token of /health_generate."""

CONTROLS = ("flush_cache", "poison", "check", "plant", "digests")
QUESTIONS = ("handoffs", "stats", "marks")


class TokenizeBody(msgspec.Struct, kw_only=True):
    prompt: str | None = None
    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    model: str | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    tokens: list[Any]
    skip_special_tokens: bool | None = None
    model: str | None = None


class AbortBody(msgspec.Struct, kw_only=True):
    rid: str | None = None
    abort_all: bool | None = None
    abort_message: str | None = None


class Operator:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._log = log.RequestLog(_log, slow_s=service.settings.slow_s, clock=service.clock)

    def routes(self) -> dict[str, dict[str, Route]]:
        """Paths to methods to what answers them."""
        routes: dict[str, dict[str, Route]] = {
            "/health": {"GET": self.health},
            "/ready": {"GET": self.ready},
            "/health_generate": {"GET": self.health_generate},
            "/metrics": {"GET": self.figures},
            "/v1/models": {"GET": self.models},
            "/get_load": {"GET": self.load},
            "/abort_request": {"POST": self.abort},
            "/tokenize": {"POST": self.tokenize},
            "/detokenize": {"POST": self.detokenize},
            "/flush_cache": {"POST": self.flush_cache, "GET": self.flush_cache},
        }
        for path in ("/server_info", "/get_server_info"):
            routes[path] = {"GET": self.describe_server}
        for path in ("/model_info", "/get_model_info"):
            routes[path] = {"GET": self.describe_model}
        for name in CONTROLS:
            routes[f"/debug/{name}"] = {"POST": self._control(name)}
        for name in QUESTIONS:
            routes[f"/debug/{name}"] = {"GET": self._control(name)}
        return routes

    # ------------------------------------------------------------------ health

    def health(self, _: Request, responder: Responder) -> None:
        """200 while the engine makes progress; 503 while it loads, when it is stalled; 502 when it is lost."""
        self._service.health.check()
        responder.send_json(200, {"status": "ok"})

    def ready(self, _: Request, responder: Responder) -> None:
        """200 once a token has come through this engine, until draining begins."""
        service = self._service
        service.health.check()
        if not service.ready or service.draining:
            why = "draining" if service.draining else "waiting for the first token"
            responder.send_json(503, {"status": "not ready", "reason": why})
            return
        responder.send_json(200, {"status": "ready"})

    async def health_generate(self, _: Request, responder: Responder) -> None:
        """200 once the engine has made one token for this very call."""
        await self.probe()
        responder.send_json(200, {"status": "ok"})

    async def probe(self, *, within_s: float = PROBE_S) -> None:
        """Make one token from one token. Raises what stands in the way."""
        service = self._service
        intake = service.model()
        first = intake.limits.eos_ids[0] if intake.limits.eos_ids else 0
        rid = f"probe#{service.link.next_serial()}"
        request = Generate(
            rid=rid,
            tokens=[first],
            num_prompt=1,
            sampling=SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True),
            priority=params.MAX_PRIORITY,
            deadline=service.clock() + within_s,
        )
        inbox = Inbox()
        service.link.submit(request, inbox, index=0)
        try:
            while True:
                for _, item in await inbox.take():
                    if isinstance(item, Exception):
                        raise item
                    if item.tokens or item.finish is not None:
                        return
        finally:
            service.link.abort(rid, "probe ended")

    # ------------------------------------------------------------------ descriptions

    def figures(self, _: Request, responder: Responder) -> None:
        responder.send(200, self._service.metrics.render(), metrics.CONTENT_TYPE)

    def models(self, _: Request, responder: Responder) -> None:
        intake = self._service.model()
        model = {
            "id": intake.names[0],
            "object": "model",
            "created": int(time.time()),
            "owned_by": "splitserve",
            "root": self._service.settings.about.get("model_path"),
            "parent": None,
            "max_model_len": intake.limits.max_len,
        }
        responder.send_json(200, {"object": "list", "data": [model]})

    def describe_server(self, _: Request, responder: Responder) -> None:
        """Settings and facts. No tokenizer_path unless it is a local directory: routers look others up online."""
        service = self._service
        hello = service.link.check()
        intake = service.model()
        role = intake.place.role
        responder.send_json(
            200,
            {
                **hello.facts,
                **service.settings.about,
                "engine_pid": hello.facts.get("pid"),
                "version": __version__,
                "served_model_name": intake.names[0],
                "max_model_len": hello.max_len,
                "disaggregation_mode": "null" if role is Role.UNIFIED else role.value,
                "disaggregation_bootstrap_port": intake.place.port or None,
                "role": role.value,
                "max_requests": service.settings.max_requests,
                "num_requests": len(service.runs),
            },
        )

    def describe_model(self, _: Request, responder: Responder) -> None:
        intake, about = self._service.model(), self._service.settings.about
        found = {
            "model_path": about.get("model_path"),
            "served_model_name": intake.names[0],
            "is_generation": True,
            "vocab_size": intake.limits.vocab_size,
            "max_model_len": intake.limits.max_len,
            "eos_token_ids": intake.limits.eos_ids,
        }
        extra = {k: about[k] for k in ("tokenizer_path", "architectures", "model_type") if k in about}
        responder.send_json(200, {**found, **extra})

    def load(self, _: Request, responder: Responder) -> None:
        """One entry, as for one data-parallel rank: SGLang's names, and ours beside them."""
        load = self._service.link.load
        running, waiting = (load.num_running, load.num_waiting) if load else (0, 0)
        entry: dict[str, Any] = {
            "dp_rank": 0,
            "num_reqs": running + waiting,
            "num_waiting_reqs": waiting,
            "num_tokens": load.queued_tokens if load else 0,
        }
        if load:
            entry |= {f: getattr(load, f) for f in load.__struct_fields__ if f != "counters"}
            entry |= {f: int(load.counters.get(f, 0)) for f in ("prompt_tokens", "output_tokens")}
        responder.send_json(200, [entry])

    # ------------------------------------------------------------------ text

    async def tokenize(self, request: Request, responder: Responder) -> None:
        """A text (`prompt` or `text`) or chat messages to token ids."""
        intake = self._service.model()
        body = typed(read_object(request.body), TokenizeBody)
        intake.check_model(body.model)
        text = body.prompt if body.prompt is not None else body.text
        if (text is None) == (body.messages is None):
            raise RequestError("give exactly one of prompt and messages", field="prompt")
        if text is not None:
            intake.check_text(len(text), "prompt" if body.prompt is not None else "text")
            tokens = await intake.tokenizer.encode_async(
                text, add_special=body.add_special_tokens is not False
            )
        else:
            tokens = (await intake.chat_prompt(ChatBody(messages=body.messages))).tokens
        responder.send_json(
            200, {"count": len(tokens), "max_model_len": intake.limits.max_len, "tokens": tokens}
        )

    def detokenize(self, request: Request, responder: Responder) -> None:
        intake = self._service.model()
        body = typed(read_object(request.body), DetokenizeBody)
        intake.check_model(body.model)
        tokens = params.check_tokens(body.tokens, "tokens", limits=intake.limits) if body.tokens else []
        text = intake.tokenizer.decode(tokens, skip_special=bool(body.skip_special_tokens))
        responder.send_json(200, {"text": text, "prompt": text})

    # ------------------------------------------------------------------ operator

    def abort(self, request: Request, responder: Responder) -> None:
        """End requests by the id that the client gave, or all. They answer with finish reason abort."""
        body = typed(read_object(request.body), AbortBody)
        if not body.rid and not body.abort_all:
            raise RequestError("give rid, or abort_all: true", field="rid")
        count = 0
        for run in list(self._service.runs):
            for index, rid in enumerate(run.job.rids):
                if body.abort_all or rid == body.rid or rid.rpartition("_")[0] == body.rid:
                    run.abort(index, "asked by /abort_request")
                    count += 1
        # What ended here before has had its line, if any: prefill's part ends when decode has taken its state.
        self._log.ended(
            lambda: f"abort of {body.rid or 'all requests'}: ended {count} here", seconds=0.0, usual=False
        )
        responder.send_json(200, {"aborted": count})

    async def flush_cache(self, _: Request, responder: Responder) -> None:
        """Forget cached prefixes that no request uses."""
        responder.send_json(200, await self._ask("flush_cache", {}))

    def _control(self, op: str) -> Route:
        async def answer(request: Request, responder: Responder) -> None:
            if op == "plant" and not self._service.settings.allow_faults:
                raise NotFound(
                    "planted faults are off here",
                    fix="start the engine with --allow-faults; never where people are served",
                )
            responder.send_json(200, await self._ask(op, read_object(request.body)))

        return answer

    async def _ask(self, op: str, args: dict[str, Any]) -> dict[str, Any]:
        try:
            reply = await self._service.link.control(op, args)
        except OverflowError as e:  # JSON's integers have no bound, the wire's have
            raise RequestError(f"a number in the body is out of range: {e}") from None
        if not reply.ok:
            raise _refusal(reply.body)
        return reply.body


def _refusal(body: dict[str, Any]) -> SplitserveError:
    error = by_code(str(body.get("code")), str(body.get("message", "the engine refused")))
    error.field, error.fix = body.get("param"), body.get("fix")
    return error
