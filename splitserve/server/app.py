"""The HTTP app of one engine: who may call, and which path does what. Callable as net.http wants it."""

from __future__ import annotations

from collections.abc import Awaitable

from splitserve.errors import NotFound
from splitserve.net.request import Request
from splitserve.net.responder import Responder

from . import openapi
from .access import Access
from .generation import Generation
from .operator import Operator, Route
from .service import Service

OPEN_PATHS = ("/health", "/ready")
"""Answered without an API key: probes have none."""


class App:
    def __init__(self, service: Service, access: Access) -> None:
        self.service = service
        self.operator = Operator(service)
        self._access = access
        generation = Generation(service)
        self._routes: dict[str, dict[str, Route]] = {
            "/v1/chat/completions": {"POST": generation.chat},
            "/v1/completions": {"POST": generation.completion},
            "/generate": {"POST": generation.generate},
            **self.operator.routes(),
            "/openapi.json": {"GET": self.describe},
        }

    def describe(self, _: Request, responder: Responder) -> None:
        """These paths and their bodies, as OpenAPI."""
        responder.send_json(200, openapi.document(self._routes))

    def __call__(self, request: Request, responder: Responder) -> Awaitable[None] | None:
        if request.path not in OPEN_PATHS:
            self._access.check(request.headers)
        route = self._routes.get(request.path)
        if route is None:
            raise NotFound(f"no path {request.path[:200]!r} here", fix="docs/api.md lists the paths")
        method = "GET" if request.method == "HEAD" else request.method
        if method not in route:
            raise NotFound(f"{request.path} takes {' or '.join(route)}, not {method[:20]}")
        return route[method](request, responder)
