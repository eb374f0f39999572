"""API keys: read from a file, compared in constant time."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from pathlib import Path

from splitserve.errors import ConfigError, Unauthorized


class Access:
    """Who may call. Without a key file: everybody."""

    def __init__(self, key_file: str) -> None:
        self._keys = _read(key_file) if key_file else ()

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


def _read(key_file: str) -> tuple[bytes, ...]:
    try:
        lines = Path(key_file).read_text(encoding="utf-8").splitlines()
    except OSError as e:
        raise ConfigError(f"API key file {key_file}: {e.strerror}", field="api_key_file") from e
    keys = tuple(line.strip().encode() for line in lines if line.strip() and not line.startswith("#"))
    if not keys:
        raise ConfigError(f"API key file {key_file} holds no key", field="api_key_file", fix="one key a line")
    return keys
