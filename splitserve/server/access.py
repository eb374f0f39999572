"""Who may call: API keys, compared in constant time."""

from __future__ import annotations

import hmac
from collections.abc import Mapping

from splitserve.errors import Unauthorized
from splitserve.net.keys import read_keys


class Access:
    """Who may call. Without a key file: everybody."""

    def __init__(self, key_file: str) -> None:
        self._keys = read_keys(key_file)

    def check(self, headers: Mapping[str, str]) -> None:
        """Raise Unauthorized unless the Authorization header carries one of the keys."""
        if not self._keys:
            return
        scheme, _, given = headers.get("authorization", "").partition(" ")
        raw = given.strip().encode("utf-8", "surrogateescape")
        # All keys are compared, so that the time says nothing about which of them was close.
        fits = [hmac.compare_digest(raw, key) for key in self._keys]
        if scheme.lower() != "bearer" or not any(fits):
            raise Unauthorized(
                "an API key is needed and was not given" if not raw else "this API key is not known",
                fix="send it as `Authorization: Bearer KEY`",
            )
