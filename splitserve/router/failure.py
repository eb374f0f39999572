"""What went wrong in one try, and what that allows: another try, or which answer. Pure.

4xx of either leg                     the client's mistake        passed on, never tried again
503 overloaded                        no room at that engine      tried elsewhere, else passed on
503 deadline_exceeded                 too late everywhere         passed on
other 5xx, an error as first event    the engine's mistake        tried again, then passed on
connection lost                       the engine's death          tried again, then 502 peer_lost
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from splitserve.errors import EngineLost, PeerLost, SplitserveError
from splitserve.net.request import Headers

from .fleet import Member
from .leg import ERROR_EVENT, Leg

_PASSED = (
    500,
    502,
    503,
)  # other server errors become 502: 504 and the like mean something else to routers above us


@dataclass(frozen=True)
class Failure:
    """Why a try did not come to a first byte. Either an engine's own answer (`status` > 0) or our `error`."""

    member: Member
    error: SplitserveError
    status: int = 0
    body: bytes = b""
    content_type: str = "application/json"
    headers: Headers = ()
    code: str = ""

    @property
    def is_refusal(self) -> bool:
        """The request itself is at fault."""
        return 400 <= self.status < 500

    @property
    def may_retry(self) -> bool:
        return not self.is_refusal and self.code != "deadline_exceeded"

    @property
    def needs_another(self) -> bool:
        """Trying the same engine again would be no use."""
        return self.code == "overloaded"

    @property
    def event(self) -> bytes:
        """What a stream that has begun says of it: the engine's own words where it said some."""
        return self.body if self.code else msgspec.json.encode({"error": self.error.to_dict()})

    @property
    def blames(self) -> bool:
        """Whether it counts against the member's circuit: a full engine and a late request do not."""
        return self.may_retry and not self.needs_another


def of_loss(member: Member, reason: str) -> Failure:
    """The connection to `member` is gone."""
    return Failure(member, PeerLost(f"{member.id} at {member.endpoint.url}: {reason}"))


def of_silence(members: Iterable[Member], silence_s: float) -> Failure | None:
    """The first of members that have said nothing for so long which is sick: a busy one is waited for."""
    for member in members:
        if not member.healthy:
            return of_loss(member, f"silent for {silence_s:g} s and unhealthy ({member.problem})")
    return None


def of_answer(leg: Leg) -> Failure:
    """`leg` ended with an error status."""
    status = leg.status if leg.status < 500 or leg.status in _PASSED else 502
    retry_after = leg.header(b"retry-after").decode("latin-1")
    return Failure(
        leg.member,
        PeerLost(f"{leg.member.id} at {leg.member.endpoint.url} answered {leg.status}"),
        status,
        leg.body,
        leg.header(b"content-type", b"application/json").decode("latin-1"),
        (("retry-after", retry_after),) if retry_after else (),
        str(_error_of(leg.body).get("code", "")),
    )


def of_events(member: Member, events: bytes, *, anywhere: bool) -> tuple[bytes, Failure | None]:
    """(`events` before an error event, the failure that it tells): the status was sent before it was known.

    Looks at the first event, or `anywhere`, which is for streams whose events pass whole.
    """
    at = events.find(ERROR_EVENT)
    if at < 0 or (at > 0 and not anywhere):
        return events, None
    told = _of_event(member, events[at:])
    return (events, None) if told is None else (events[:at], told)


def of_error_event(leg: Leg) -> Failure:
    """What a leg's stream said after its head had gone well."""
    event = leg.error_event[leg.error_event.find(ERROR_EVENT) :]
    return _of_event(leg.member, event) or of_loss(leg.member, "ended its stream with an error")


def _of_event(member: Member, event: bytes) -> Failure | None:
    payload = event.partition(b"\n")[0].removeprefix(b"data: ")
    error = _error_of(payload)
    if not error:
        return None
    told = error.get("code", "")
    # SGLang and vLLM put an HTTP status where ours has a name.
    is_status = isinstance(told, int) and not isinstance(told, bool)
    mistake = 400 <= told < 500 if is_status else error.get("type") == "invalid_request_error"
    code = "engine_error" if is_status else str(told)
    status = 400 if mistake else EngineLost.status if code == EngineLost.code else 503
    return Failure(member, PeerLost(f"{member.id}: {error.get('message')}"), status, payload, code=code)


def _error_of(body: bytes) -> dict[str, Any]:
    """The error object in a body, if there is one."""
    try:
        decoded = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return {}
    error = decoded.get("error") if isinstance(decoded, dict) else None
    return error if isinstance(error, dict) else {}
