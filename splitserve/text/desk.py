"""Where long texts are worked on: a few threads, so that the event loop goes on and a flood of texts stays bounded.

A text whose client has left while it waited is never begun; one that is under way cannot be stopped. What waits is
counted in characters: an encoder holds some hundred bytes for each.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from splitserve.errors import Overloaded

T = TypeVar("T")

THREADS = 2
MOST_WAITING = 16 << 20
"""Characters that may wait or be worked on; the first is taken however long it is."""


class Desk:
    def __init__(self, name: str, *, most: int = MOST_WAITING) -> None:
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix=name)
        self._most = most
        self.waiting = 0

    async def do(self, size: int, work: Callable[[], T]) -> T:
        """The result of `work` on a text of so many characters. Raises Overloaded where too much waits already."""
        if self.waiting and self.waiting + size > self._most:
            raise Overloaded(
                "too many long texts are waiting to be read", fix="send fewer at once, or token ids"
            )
        self.waiting += size
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self.waiting -= size


TEXTS = Desk("texts")
GRAMMARS = Desk("grammars")
"""Apart from texts: a short grammar does not wait behind long prompts."""
