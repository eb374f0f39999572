"""API keys, as files hold them: one a line; empty lines and those that begin with # are none.

Servers read all of a file's keys, clients the first. Compares nothing and sends nothing.
"""

from __future__ import annotations

import os
from pathlib import Path

from splitserve.errors import ConfigError

ENVIRONMENT = "SPLITSERVE_API_KEY"
"""A client's key where no flag gives one: unlike a flag, other users of the machine cannot see it."""


def read_keys(path: str) -> tuple[bytes, ...]:
    """All keys of a file; () where `path` is empty. ConfigError for a file that is unreadable or holds none."""
    if not path:
        return ()
    fix = "one key a line, in a file that this user may read"
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as e:
        why = getattr(e, "strerror", None) or e
        raise ConfigError(f"API key file {path}: {why}", field="api_key_file", fix=fix) from None
    keys = tuple(line.strip().encode() for line in lines if line.strip() and not line.startswith("#"))
    if not keys:
        raise ConfigError(f"API key file {path} holds no key", field="api_key_file", fix=fix)
    return keys


def first_key(path: str) -> str:
    """The key that a client sends; "" where `path` is empty. Raises as `read_keys`."""
    return next(iter(read_keys(path)), b"").decode()


def given_key(key: str, path: str) -> str:
    """The key that a person gave: itself, in a file, or in the environment; "" where there is none."""
    return key or first_key(path) or os.environ.get(ENVIRONMENT, "")


def bearer(key: str) -> list[tuple[str, str]]:
    """The header by which a client gives its key; none where `key` is empty."""
    return [("authorization", f"Bearer {key}")] if key else []
