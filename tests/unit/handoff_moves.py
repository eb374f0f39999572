"""What may happen next in a World: messages, work of the engines, writes that land, misfortunes, and time.

Time passes on its own only when nothing else can happen, and only where there is a reason to need it: something was
lost, broken, stopped or never asked for. A handoff that needs a time-out otherwise is stuck, and the walk says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from handoff_world import World

from splitserve.transfer.handoff import RX_FINAL, TX_FINAL, Rx, Tx


def moves(w: World) -> list[tuple[str, object]]:
    """Everything that can happen now. Time passes on its own only when nothing else can happen."""
    found = [*_messages(w), *_engines(w), *_hardware(w), *_misfortunes(w)]
    if not found or w.left.time:
        found += _time(w)
    return found


def _messages(w: World) -> Iterator[tuple[str, object]]:
    if w.to_tx and w.runs("tx"):
        yield "deliver to tx", None
    if w.to_rx and w.runs("rx"):
        yield "deliver to rx", None
    for note in w.notes if w.runs("rx") else ():
        yield "note", note


def _engines(w: World) -> Iterator[tuple[str, object]]:
    tx, rx = w.tx, w.rx
    if w.runs("tx") and not w.tx_holds and "requested" not in w.tx_told and not w.left.no_request:
        yield "request", None
    computes = tx.num_chunks < w.left.chunks and tx.state in (Tx.HOLDING, Tx.SENDING)
    if w.runs("tx") and w.tx_holds and computes:
        yield "computed", None
    if w.runs("rx") and rx.state is Rx.OPEN and w.left.offers:
        yield "offer", None
    if w.runs("rx") and w.comparing:
        yield "compare", True


def _hardware(w: World) -> Iterator[tuple[str, object]]:
    for write in w.flying if w.runs("tx") and w.runs("rx") else ():
        yield "land", write
    for write in w.stray:
        yield "stray lands", write
        yield "stray vanishes", write
    if not w.tx_alive and not w.rx_knows_death and w.runs("rx") and not w.stray:
        yield "rx learns of death", None
    if not w.rx_alive and not w.tx_knows_death and w.runs("tx"):
        yield "tx learns of death", None
    for who in w.fenced:
        if w.tx_alive if who == "tx" else w.rx_alive:
            yield f"{who} dies", None


def _misfortunes(w: World) -> Iterator[tuple[str, object]]:
    left = w.left
    if left.failures and w.runs("tx") and w.tx.state not in (*TX_FINAL, Tx.NEW):
        yield "tx fails", None
    if left.failures and w.runs("rx") and w.rx.state not in RX_FINAL:
        yield "rx fails", None
        yield "rx cancels", None
    if left.offers and w.runs("rx") and w.rx.state is Rx.OFFERED:
        yield "offer", None
    for write in w.flying if left.breaks and w.runs("tx") else ():
        yield "break", write
    for note in w.heard if left.duplicates and w.runs("rx") else ():
        yield "note again", note
    if left.losses:
        yield from (("lose to tx", None),) if w.to_tx else ()
        yield from (("lose to rx", None),) if w.to_rx else ()
    if left.silences and w.runs("rx") and w.rx.state not in RX_FINAL:
        yield "rx hears nothing", None
    if left.silences and w.runs("tx") and w.tx.state is Tx.DRAINING:
        yield "tx hears nothing", None
    for who, may in (("tx", left.prefill_dies), ("rx", left.decode_dies)):
        if may and (w.tx_alive if who == "tx" else w.rx_alive):
            yield f"{who} dies", None
    for who, may in (("tx", left.prefill_stops), ("rx", left.decode_stops)):
        if may and w.runs(who):
            yield f"{who} stops", None
    for note in w.notes if left.lost_notes else ():
        yield "lose note", note
    if left.wrong and w.runs("rx") and w.comparing:
        yield "compare", False


def _time(w: World) -> Iterator[tuple[str, object]]:
    """Time-outs, where there is a reason to need one."""
    tx, rx, left = w.tx, w.rx, w.left
    excuse = w.lost or left.time
    if w.runs("tx"):
        unasked = tx.state is Tx.HOLDING and (rx.state in RX_FINAL or not w.runs("rx"))
        alone = tx.state is Tx.EXPECTED and left.no_request
        unheard = tx.state is Tx.SENDING and "rx" in w.stopped
        if unasked or alone or unheard or (excuse and tx.state in (Tx.EXPECTED, Tx.HOLDING, Tx.SENDING)):
            yield "tx is late", None
        if tx.state is Tx.DRAINING and "rx" in w.stopped and "rx" not in w.fenced:
            yield "tx hears nothing", None
    if w.runs("rx"):
        if (excuse or w.note_lost) and rx.state in (Rx.OPEN, Rx.OFFERED):
            yield "rx is late", None
        if w.note_lost and rx.state is Rx.OFFERED and rx._gap_at < inf:
            yield "rx misses a note", None
        if "tx" in w.stopped and w.tx_alive and rx.state in (Rx.OFFERED, Rx.QUARANTINE):
            yield "rx hears nothing", None
        if rx.state in (Rx.QUARANTINE, Rx.FENCING):
            yield from ((("rx asks again", None),) if w.repeated < w.lost + w.broke + left.time else ())
            yield from ((("rx waits on", None),) if (w.broke or left.time) and rx._overdue_at < inf else ())
