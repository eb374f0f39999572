"""The router's own routes, keys, and the hand-over of everything else to the proxy.

POST /generate, /v1/completions, /v1/chat/completions   through a pair (proxy.py)
POST /tokenize, /detokenize, other /v1/*                to one engine that answers
GET  /v1/models, /model_info, /get_model_info           from one engine that answers
POST /flush_cache, /abort_request                       to every engine
GET  /health /ready /metrics /workers /server_info /get_server_info /get_load /health_generate /openapi.json
POST /workers {"url", "worker_type", "bootstrap_port"}    DELETE /workers/ID    POST /workers/ID/drain|undrain
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

import splitserve
from splitserve.config import RouterConfig
from splitserve.errors import NotFound, Overloaded, RequestError, SplitserveError, Unauthorized
from splitserve.net.client import Client
from splitserve.net.request import Request
from splitserve.net.responder import Responder
from splitserve.types import Role

from . import openapi
from .fleet import Endpoint, Fleet, Member
from .proxy import GENERATING, Proxy
from .watch import Watch

OPEN = frozenset(("/health", "/ready", "/liveness", "/readiness"))
"""Paths that need no key: probes have none."""

_FROM_ONE = frozenset(("/v1/models", "/model_info", "/get_model_info"))
_TO_ONE = frozenset(("/tokenize", "/detokenize"))
_TO_ALL = frozenset(("/flush_cache", "/abort_request"))
_CONTROL_TIMEOUT_S = 30.0

Route = Callable[[Request, Responder], Awaitable[None]]


class NewWorker(msgspec.Struct):
    """Body of POST /workers; also in sglang_router's words."""

    url: str
    worker_type: str = "unified"
    bootstrap_port: int | None = None


class RouterApp:
    """An app for net.http.serve."""

    def __init__(
        self,
        config: RouterConfig,
        *,
        name: str,
        fleet: Fleet,
        proxy: Proxy,
        watch: Watch,
        client: Client,
        keys: tuple[bytes, ...] = (),
    ) -> None:
        self._config = config
        self._name = name
        self._fleet = fleet
        self._proxy = proxy
        self._watch = watch
        self._client = client
        self._keys = keys
        self._routes: dict[tuple[str, str], Route] = {
            ("GET", "/health"): self._health,
            ("GET", "/liveness"): self._health,
            ("GET", "/ready"): self._ready,
            ("GET", "/readiness"): self._ready,
            ("GET", "/health_generate"): self._health_generate,
            ("GET", "/metrics"): self._metrics,
            ("GET", "/workers"): self._list_workers,
            ("POST", "/workers"): self._add_worker,
            ("GET", "/server_info"): self._server_info,
            ("GET", "/get_server_info"): self._server_info,
            ("GET", "/get_load"): self._get_load,
            ("GET", "/openapi.json"): self._openapi,
        }
        self._known_paths = {path for _, path in self._routes} | GENERATING | _FROM_ONE | _TO_ONE | _TO_ALL

    def __call__(self, request: Request, responder: Responder) -> Awaitable[None] | None:
        if self._keys and request.path not in OPEN:
            self._authorize(request)
        if request.method == "POST" and request.path in GENERATING:
            self._proxy.handle(request, responder)
            return None
        return self._other(request, responder)

    def _authorize(self, request: Request) -> None:
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        given = key.strip().encode()
        known = [
            hmac.compare_digest(given, k) for k in self._keys
        ]  # every key, whichever matches: equal time
        if scheme.lower() != "bearer" or not any(known):
            raise Unauthorized("an API key is needed", fix="send the header Authorization: Bearer KEY")

    async def _other(self, request: Request, responder: Responder) -> None:
        method = "GET" if request.method == "HEAD" else request.method
        path = request.path
        route = self._routes.get((method, path))
        if route is not None:
            await route(request, responder)
        elif path.startswith("/workers/"):
            await self._one_worker(method, path, responder)
        elif path in _TO_ALL and method in ("GET", "POST"):
            await self._to_all(request, responder)
        elif (path in _FROM_ONE and method == "GET") or (
            method == "POST" and (path in _TO_ONE or (path.startswith("/v1/") and path not in _FROM_ONE))
        ):
            await self._to_one(request, responder)
        elif path in self._known_paths:
            raise RequestError(f"{path} does not take {request.method}", field="method")
        else:
            raise NotFound(f"no route {request.method} {path[:200]}", fix="docs/router.md lists the paths")

    # -------------------------------------------------------------- state

    async def _health(self, request: Request, responder: Responder) -> None:  # noqa: ARG002
        responder.send_json(200, {"status": "ok", "name": self._name})

    async def _ready(self, request: Request, responder: Responder) -> None:  # noqa: ARG002
        unproven = [f"{p.id}+{a.id}" if p else a.id for p, a in self._fleet.unproven()]
        problems = {m.id: m.problem for m in self._fleet if not m.healthy}
        body = {
            "ready": self._fleet.ready,
            "proven": self._fleet.num_proven,
            "unproven": unproven,
            "down": problems,
            "problems": {
                pair: {"message": p.message, "code": p.code} for pair, p in self._fleet.problems.items()
            },
        }
        responder.send_json(
            200 if self._fleet.ready else 503, body, () if self._fleet.ready else (("retry-after", "1"),)
        )

    async def _health_generate(self, request: Request, responder: Responder) -> None:
        """A real token through a chosen route."""
        path, body = self._proxy.dialect.probe
        ask = Request("POST", path.encode(), request.raw_headers, body)
        self._proxy.handle(ask, responder)
        await responder.finished()

    async def _metrics(self, request: Request, responder: Responder) -> None:  # noqa: ARG002
        now = self._proxy.now()
        members = list(self._fleet)

        def gauge(read: Callable[[Member], float]) -> list[tuple[str, float]]:
            return [(f'{{id="{m.id}",role="{m.role.value}"}}', read(m)) for m in members]

        self._proxy.metrics.num_probes = self._watch.num_probes
        gauges = {
            "requests_running": [("", float(self._proxy.num_active))],
            "pairs_proven": [("", float(self._fleet.num_proven))],
            "ready": [("", float(self._fleet.ready))],
            "worker_healthy": gauge(lambda m: m.healthy),
            "worker_draining": gauge(lambda m: m.draining),
            "worker_requests": gauge(lambda m: m.num_inflight),
            "worker_queued_tokens": gauge(lambda m: m.load.queued_tokens),
            "worker_free_pages": gauge(lambda m: m.load.free_pages),
            "worker_circuit_open": gauge(lambda m: m.circuit.state(now) != "closed"),
        }
        responder.send(200, self._proxy.metrics.text(gauges), "text/plain; version=0.0.4; charset=utf-8")

    async def _server_info(self, request: Request, responder: Responder) -> None:  # noqa: ARG002
        facts = {
            "name": self._name,
            "role": "router",
            "version": splitserve.__version__,
            "policy": self._config.policy,
            "workers": self._describe_all(),
        }
        responder.send_json(200, facts)

    async def _get_load(self, request: Request, responder: Responder) -> None:  # noqa: ARG002
        members = [
            {
                "id": m.id,
                "num_reqs": m.load.num_running + m.load.num_waiting,
                "num_waiting_reqs": m.load.num_waiting,
                "queued_tokens": m.load.queued_tokens,
                "free_pages": m.load.free_pages,
                "total_pages": m.load.total_pages,
                "num_inflight": m.num_inflight,
            }
            for m in self._fleet
        ]
        responder.send_json(200, members)

    async def _openapi(self, request: Request, responder: Responder) -> None:
        status, body, kind = await self._ask_one(request)
        if status != 200:
            responder.send(status, body, kind)
            return
        engine = msgspec.json.decode(body, type=dict[str, Any])
        passed_on = GENERATING | _FROM_ONE | _TO_ONE | _TO_ALL
        responder.send_json(200, openapi.merged(engine, self._routes, passed_on=passed_on))

    # -------------------------------------------------------------- workers

    def _describe_all(self) -> list[dict[str, Any]]:
        now = self._proxy.now()
        return [describe(member, now) for member in self._fleet]

    async def _list_workers(self, request: Request, responder: Responder) -> None:  # noqa: ARG002
        responder.send_json(200, {"workers": self._describe_all()})

    async def _add_worker(self, request: Request, responder: Responder) -> None:
        try:
            new = msgspec.json.decode(request.body, type=NewWorker)
        except (msgspec.DecodeError, RecursionError) as e:
            raise RequestError(
                f"the body is no worker: {e}", fix='{"url": "http://...", "worker_type": "decode"}'
            ) from None
        role = {"regular": "unified"}.get(new.worker_type, new.worker_type)
        if role not in tuple(Role):
            raise RequestError(
                f"no worker type {new.worker_type!r}", field="worker_type", fix="prefill, decode or unified"
            )
        if "://" not in new.url:  # the command line may leave it out; a request that does is mostly a mistake
            raise RequestError(f"{new.url!r} is not a URL", field="url", fix="write http://HOST:PORT")
        if new.url.rstrip("/").partition("://")[2] == request.headers.get("host"):
            raise RequestError(f"{new.url} is this router itself", field="url", fix="add an engine")
        text = new.url if new.bootstrap_port is None else f"{new.url},{new.bootstrap_port}"
        try:
            member = self._fleet.add(Endpoint.parse(text, Role(role)))
        except SplitserveError as e:
            raise RequestError(e.message, field="url", fix=e.fix) from None
        self._watch.follow(member)
        responder.send_json(202, {"status": "accepted", "worker_id": member.id})

    async def _one_worker(self, method: str, path: str, responder: Responder) -> None:
        member_id, _, verb = path.removeprefix("/workers/").partition("/")
        match method, verb:
            case "GET", "":
                responder.send_json(200, describe(self._fleet.get(member_id), self._proxy.now()))
            case "DELETE", "":
                member = self._fleet.remove(member_id)
                self._watch.leave(member)
                self._proxy.removed(member)
                told = {"status": "removed", "worker_id": member_id, "num_inflight": member.num_inflight}
                responder.send_json(200, told)
            case "POST", "drain":
                responder.send_json(200, describe(self._fleet.drain(member_id), self._proxy.now()))
            case "POST", "undrain":
                responder.send_json(200, describe(self._fleet.undrain(member_id), self._proxy.now()))
            case _:
                raise NotFound(f"no route {method} {path}")

    # -------------------------------------------------------------- plain forwarding

    async def _to_one(self, request: Request, responder: Responder) -> None:
        answer = await self._ask_one(request)
        responder.send(answer[0], answer[1], answer[2])

    async def _ask_one(self, request: Request) -> tuple[int, bytes, str]:
        """An engine that answers (decode or unified); Overloaded when there is none."""
        up = [m for m in self._fleet if m.healthy and not m.draining]
        member = min((m for m in up if m.role is not Role.PREFILL), key=lambda m: m.pressure, default=None)
        if member is None:
            raise Overloaded("no engine is up that could answer")
        return await self._forward(request, member)

    async def _to_all(self, request: Request, responder: Responder) -> None:
        members = [m for m in self._fleet if m.healthy]
        if not members:
            raise Overloaded("no engine is up")
        answers = await asyncio.gather(*(self._forward(request, m) for m in members), return_exceptions=True)
        if request.path == "/flush_cache":
            self._proxy.chooser.seen.forget()
        told: dict[str, dict[str, Any]] = {}
        for member, answer in zip(members, answers, strict=True):
            if isinstance(answer, BaseException):
                if not isinstance(answer, SplitserveError):
                    raise answer
                told[member.id] = {"status": answer.status, "error": answer.message}
            else:
                told[member.id] = {"status": answer[0]}
        refused = next((a for a in answers if not isinstance(a, BaseException) and 400 <= a[0] < 500), None)
        if refused is not None and all(400 <= t["status"] < 500 for t in told.values()):
            responder.send(*refused)  # the caller's own mistake, said in the engines' words
            return
        failed = any(t["status"] >= 300 for t in told.values())
        responder.send_json(502 if failed else 200, {"success": not failed, "workers": told})

    async def _forward(self, request: Request, member: Member) -> tuple[int, bytes, str]:
        target = request.origin_form.decode("latin-1")
        names = ("content-type", "authorization", "x-request-id")
        headers = [(n, request.headers[n]) for n in names if n in request.headers]
        if not target.startswith("/"):
            raise RequestError(f"cannot forward {target!r}", field="target")
        answer = await self._client.request(
            "GET" if request.method == "HEAD" else request.method,  # its head is the same; the body ends here
            member.endpoint.url + target,
            body=request.body,
            headers=headers,
            timeout_s=_CONTROL_TIMEOUT_S,
        )
        return answer.status, answer.body, answer.headers.get("content-type", "application/json")


def describe(member: Member, now: float) -> dict[str, Any]:
    """One entry of GET /workers."""
    return {
        "id": member.id,
        "url": member.endpoint.url,
        "worker_type": member.role.value,
        "bootstrap_port": member.bootstrap_port,
        "is_healthy": member.healthy,
        "draining": member.draining,
        "problem": member.problem,
        "circuit": member.circuit.state(now),
        "num_inflight": member.num_inflight,
        "load": msgspec.to_builtins(member.load),
        "tokens_per_s": member.tokens_per_s,
    }
