"""Request bytes to a typed struct. Whatever is wrong with them is a RequestError that names the field."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

import msgspec

from splitserve.errors import RequestError
from splitserve.net.request import AN_OBJECT

T = TypeVar("T", bound=msgspec.Struct)

_decoder = msgspec.json.Decoder()
_PLACE = re.compile(r"^(?P<what>.*) - at `\$\.?(?P<where>.*)`$", re.DOTALL)


def read_object(raw: bytes) -> dict[str, Any]:
    """The JSON object in `raw`; an empty body is an empty object."""
    if not raw.strip():
        return {}
    try:
        found = _decoder.decode(raw)
    except RecursionError:
        raise RequestError("the body is JSON nested too deeply", fix=AN_OBJECT) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise RequestError(f"the body is not valid JSON: {e}", fix=AN_OBJECT) from None
    if not isinstance(found, dict):
        raise RequestError(f"the body must be a JSON object, not {_name(found)}", fix=AN_OBJECT)
    return found


def typed(
    given: Mapping[str, Any],
    kind: type[T],
    *,
    ignored: Collection[str] = (),
    neutral: Mapping[str, tuple[Any, ...]] | None = None,
    prefix: str = "",
) -> T:
    """`given` as a `kind`. Unknown fields, unsupported values and wrong types are refused by name.

    `prefix` is put before field names in errors, for objects inside the body.
    """
    known = kind.__struct_fields__
    neutral = neutral or {}
    for name, value in given.items():
        if name in known or name in ignored or value is None:
            continue
        if name not in neutral:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f": did you mean {prefix}{near[0]}?" if near else ""
            raise RequestError(f"unknown field {prefix}{name}{hint}", field=f"{prefix}{name}")
        if value not in neutral[name]:
            raise RequestError(f"{prefix}{name} is not supported by this server", field=f"{prefix}{name}")
    try:
        return msgspec.convert({k: v for k, v in given.items() if k in known}, kind)
    except msgspec.ValidationError as e:
        raise _wrong_type(str(e), prefix) from None


def _wrong_type(message: str, prefix: str) -> RequestError:
    """From "Expected `int | null`, got `str` - at `$.n`" to a sentence that begins with the field."""
    found = _PLACE.match(message)
    what, where = (found["what"], found["where"]) if found else (message, "")
    what = what.replace(" | null", "").replace("`", "")
    field = f"{prefix}{where}"
    return RequestError(f"{field}: {what[:1].lower()}{what[1:]}" if field else what, field=field or None)


def _name(value: Any) -> str:
    return {list: "an array", str: "a string", type(None): "null", bool: "a boolean"}.get(
        type(value), "a number"
    )
