"""The router's /openapi.json: an engine's document, cut down to what passes through here, with the router's own paths.

Bodies are the engines' affair, so that their description is too: the router knows no field names. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

WORKERS = {
    "/workers/{id}": {
        "get": "one member and its state",
        "delete": "remove it; its requests have drain_s to end, then an error",
    },
    "/workers/{id}/drain": {"post": "no new requests for it; running ones end"},
    "/workers/{id}/undrain": {"post": "take it back"},
}
_ID = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}


def merged(
    engine: dict[str, Any], own: Iterable[tuple[str, str]], *, passed_on: Collection[str]
) -> dict[str, Any]:
    """`engine`'s document with only the paths in `passed_on`, and the router's `own` (method, path) pairs."""
    paths: dict[str, Any] = {p: v for p, v in engine.get("paths", {}).items() if p in passed_on}
    for method, path in own:
        operations = paths.setdefault(path, {})
        operations[method.lower()] = _operation(f"{method} {path} of the router")
    for path, verbs in WORKERS.items():
        paths[path] = {verb: {**_operation(what), "parameters": [_ID]} for verb, what in verbs.items()}
    return {**engine, "paths": paths}


def _operation(summary: str) -> dict[str, Any]:
    return {"summary": summary, "responses": {"200": {"description": "done"}}}
