"""What decode says when state does not come in time: the setting and its value, and nothing that varies."""

from __future__ import annotations

from splitserve.errors import DeadlineExceeded
from splitserve.transfer.incoming import Incoming
from splitserve.wire import Note


def late(*, accepted: bool) -> DeadlineExceeded:
    table = Incoming(deadline=5.0, deadline_s=60.0)
    table.offer()
    if accepted:
        table.accepted(1, {(0, 0): 100}, now=1.0)
        table.noted(0, Note(room=1, generation=1, src_rank=0, chunk=0, bytes=40, last=False), now=2.0)
    table.tick(5.0)
    assert isinstance(table.error, DeadlineExceeded)
    return table.error


def test_names_the_setting_and_no_counts() -> None:
    assert late(accepted=True).message == "state did not arrive within [transfer] deadline_s = 60 s"
    assert late(accepted=False).message.endswith("half of the request within [transfer] deadline_s = 60 s")
