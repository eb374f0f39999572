"""Talks to one server (an engine's or the router's): asks questions and makes the operator's calls of the proof."""

from __future__ import annotations

from typing import Any

import msgspec

from splitserve.errors import ConfigError, NotFound, SplitserveError
from splitserve.net.client import Client, Unreachable
from splitserve.net.keys import bearer
from splitserve.proof.cases import TEXT, Question
from splitserve.proof.judge import Answer

ANSWER_S = 120.0
CALL_S = 30.0


class Side:
    """One HTTP server.

    What goes wrong behind an answer (5xx, a connection lost meanwhile) is a finding: an Answer's `error`. A question
    that could not be asked at all (4xx, nobody listens) proves nothing either way: ConfigError.
    """

    def __init__(self, client: Client, url: str, name: str, *, api_key: str = "") -> None:
        self.url = url.rstrip("/")
        self.name = name
        self._client = client
        self._headers = [("content-type", "application/json"), *bearer(api_key)]

    async def ask(self, question: Question) -> Answer:
        """The answer of /generate, with logprobs and the two best tokens of every place.

        ConfigError where it could not be asked.
        """
        body = {
            "input_ids": list(question.tokens),
            "sampling_params": {
                "temperature": question.temperature,
                "sampling_seed": question.seed,
                "max_new_tokens": question.num_new,
                "ignore_eos": True,
            },
            "return_logprob": True,
            "top_logprobs_num": 2,
        }
        try:
            status, answer = await self._call("POST", "/generate", body, ANSWER_S)
        except ConfigError:
            raise
        except SplitserveError as e:
            return Answer(error=f"{e.code}: {e.message}")
        if 400 <= status < 500:
            raise self._refused("/generate", status, answer)
        if status != 200:
            return Answer(error=f"HTTP {status}: {_message(answer)}")
        return _read_answer(answer)

    async def text_ids(self) -> list[int]:
        """The tokens of our text under this server's tokenizer."""
        found = await self.call("POST", "/tokenize", {"prompt": TEXT})
        return [int(t) for t in found["tokens"]]

    async def facts(self) -> dict[str, Any]:
        return await self.call("GET", "/server_info")

    async def handoffs(self) -> dict[str, Any]:
        return await self.call("GET", "/debug/handoffs")

    async def counters(self) -> dict[str, Any]:
        return dict((await self.call("GET", "/debug/stats"))["counters"])

    async def operate(self, op: str, **args: Any) -> dict[str, Any]:
        """flush_cache, poison, check, plant or digests."""
        return await self.call("POST", f"/debug/{op}", args)

    async def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """A call that must work. Raises ConfigError with the server's own message, NotFound for a 404."""
        status, answer = await self._call(method, path, body, CALL_S)
        if status == 404:
            raise NotFound(f"{self.name} ({self.url}) has no {path}: is it a splitserve engine?")
        if status != 200:
            raise self._refused(path, status, answer)
        if not isinstance(answer, dict):
            raise ConfigError(f"{self.name} answered {path} with {type(answer).__name__}, not an object")
        return answer

    async def _call(
        self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float
    ) -> tuple[int, Any]:
        raw = b"" if body is None else msgspec.json.encode(body)
        try:
            response = await self._client.request(
                method, self.url + path, body=raw, headers=self._headers, timeout_s=timeout_s
            )
        except Unreachable as e:
            raise ConfigError(
                f"{self.name} could not be asked: {e.message}", fix="splitserve status says what is up"
            ) from None
        try:
            return response.status, msgspec.json.decode(response.body) if response.body else {}
        except msgspec.DecodeError:
            return response.status, {"error": {"message": response.body[:200].decode("utf-8", "replace")}}

    def _refused(self, path: str, status: int, answer: Any) -> ConfigError:
        told = answer.get("error") if isinstance(answer, dict) else None
        fix = told.get("fix") if isinstance(told, dict) else None
        if status == 401:
            fix = "its key file has changed since it started, or another program listens there: restart it"
        return ConfigError(
            f"{self.name} ({self.url}) refused {path} with {status}: {_message(answer)}",
            fix=fix or "splitserve status says what is up, splitserve logs what it did",
        )


def _read_answer(answer: Any) -> Answer:
    meta = answer.get("meta_info", {})
    logprobs = tuple(float(entry[0]) for entry in meta.get("output_token_logprobs", ()))
    margins = tuple(
        float(best[0][0]) - float(best[1][0]) if best and len(best) > 1 else float("inf")
        for best in meta.get("output_top_logprobs", ())
    )
    tokens = tuple(int(t) for t in answer.get("output_ids", ()))
    return Answer(tokens, logprobs, margins, answer.get("text", ""))


def _message(answer: Any) -> str:
    if isinstance(answer, dict):
        error = answer.get("error", answer)
        return str(error.get("message", error) if isinstance(error, dict) else error)
    return str(answer)
