"""An unknown field of a request body: its message has the likely right one."""

from __future__ import annotations

import msgspec
import pytest

from splitserve.errors import RequestError
from splitserve.server.body import typed


class Asked(msgspec.Struct):
    max_tokens: int = 16


def test_the_likely_field_is_named() -> None:
    with pytest.raises(RequestError, match=r"unknown field max_token: did you mean max_tokens\?") as e:
        typed({"max_token": 3}, Asked)
    assert e.value.field == "max_token"


def test_nothing_is_guessed_where_nothing_is_near() -> None:
    with pytest.raises(RequestError, match=r"unknown field zzz$"):
        typed({"zzz": 3}, Asked)
