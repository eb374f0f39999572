"""What a proof asks: with each server's own key; and a question that could not be asked is no finding."""

from __future__ import annotations

from pathlib import Path

import pytest

from splitserve.errors import ConfigError
from splitserve.net.client import Client
from splitserve.net.http import Request, Responder, serve
from splitserve.proof.cases import Question
from splitserve.proof.sides import Side
from splitserve.proof.stage import Door, _doors
from tests.wire_http import go

QUESTION = Question("one", (1, 2, 3), 1)


async def asked(status: int, body: object) -> str:
    """The error of an answer with this status."""

    def app(req: Request, res: Responder) -> None:
        res.send_json(status, body)

    server = await serve(app, host="127.0.0.1", port=0)
    try:
        async with Client() as client:
            return (await Side(client, f"http://127.0.0.1:{server.port}", "the router").ask(QUESTION)).error
    finally:
        await server.close()


@pytest.mark.parametrize("status", [400, 401, 404, 413])
def test_a_refused_question_is_no_finding(status: int) -> None:
    with pytest.raises(ConfigError, match=rf"the router .*refused /generate with {status}: why") as caught:
        go(asked(status, {"error": {"message": "why"}}))
    assert caught.value.fix


def test_nobody_there_is_no_finding() -> None:
    async def run() -> None:
        async with Client() as client:
            side = Side(client, "http://127.0.0.1:1", "the router")
            for ask in (side.ask(QUESTION), side.facts()):
                with pytest.raises(ConfigError, match="the router could not be asked") as caught:
                    await ask
                assert caught.value.fix

    go(run())


def test_what_failed_behind_an_answer_is_a_finding() -> None:
    async def run() -> None:
        assert await asked(503, {"error": {"message": "the state did not cross"}}) == (
            "HTTP 503: the state did not cross"
        )

    go(run())


def test_each_side_is_asked_with_its_own_key(tmp_path: Path) -> None:
    (tmp_path / "router").write_text("# who may ask\nfor-all\nfor-some\n")
    (tmp_path / "engines").write_text("inner\n")
    roles = ("router", "prefill", "decode")
    found = {"name": "d", "processes": [{"role": r, "url": f"http://{r}"} for r in roles]}
    assert _doors(found).router == Door("http://router")
    found |= {"api_key_file": str(tmp_path / "router"), "engine_key_file": str(tmp_path / "engines")}
    doors = _doors(found)
    assert (doors.router.key, doors.prefill.key, doors.decode.key) == ("for-all", "inner", "inner")
    with pytest.raises(ConfigError, match="missing"):
        _doors({**found, "api_key_file": str(tmp_path / "missing")})
