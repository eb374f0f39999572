"""GET /openapi.json: this server's paths and bodies in OpenAPI 3.1, made from the routes and body structs themselves.

It cannot drift from the code: fields and their types are those that `body.typed` checks, summaries are the first lines
of the routes' docstrings. Ranges are in docs/api.md.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from splitserve import __version__

from .openai import ChatBody, CompletionBody
from .operator import AbortBody, DetokenizeBody, TokenizeBody
from .sglang import GenerateBody, SglangSampling

BODIES: dict[str, type[msgspec.Struct]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/generate": GenerateBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
    "/abort_request": AbortBody,
}

_REF = "#/components/schemas/{name}"
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "code", "fix"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "code": {"type": "string"},
                "param": {"type": ["string", "null"], "description": "the field at fault"},
                "fix": {"type": "string", "description": "what to do about it"},
            },
        }
    },
}


def document(routes: Mapping[str, Mapping[str, Callable[..., Any]]]) -> dict[str, Any]:
    """The whole document for paths to methods to what answers them."""
    schemas, named = _schemas()
    paths = {
        path: {
            method.lower(): _operation(path, method, route, named.get(path))
            for method, route in methods.items()
        }
        for path, methods in routes.items()
        if not path.startswith("/debug/")
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "splitserve", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": {**schemas, "Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _schemas() -> tuple[dict[str, Any], dict[str, Any]]:
    """(components, body schema of each path). `sampling_params` is read as an object first, so it is put in by hand."""
    kinds = [*BODIES.values(), SglangSampling]
    found, components = msgspec.json.schema_components(kinds, ref_template=_REF)
    sampling = {"anyOf": [found[-1], {"type": "null"}], "default": None}
    components["GenerateBody"]["properties"]["sampling_params"] = sampling
    return components, dict(zip(BODIES, found, strict=False))


def _operation(path: str, method: str, route: Callable[..., Any], body: Any) -> dict[str, Any]:
    summary = (inspect.getdoc(route) or path.strip("/").replace("_", " ")).split("\n", 1)[0]
    error = {"description": "an error", "content": _json({"$ref": _REF.format(name="Error")})}
    operation: dict[str, Any] = {
        "summary": summary,
        "operationId": f"{method.lower()}{path.replace('/', '_')}",
        "responses": {"200": {"description": "done"}, "default": error},
    }
    if body is not None and method == "POST":
        operation["requestBody"] = {"required": True, "content": _json(body)}
    return operation


def _json(schema: Any) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
