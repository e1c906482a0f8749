"""The fence between copies and memory: the memory of a copy is kept until the device reports the copy's end.

1. The caller that begins a copy passes its event and all memory of it to `InFlight.hold`: views of pinned blocks,
   staging memory, uses of registered pages.
2. One thread for each device waits for the events in their order, and then drops the memory. So pins return only after
   the event, even if batch, tensors and queue let go of them before.
3. If the device reports an error instead, whatever its type, no copy of it runs any more, and the memory is dropped. An
   error of one copy is logged, and the thread goes on to the next.
4. The thread ends `DEVICE_IDLE_S` after the last copy, and then gives up idle registrations, so that the arena's owner
   can return their pages. A put waits for its own copy. It also passes the event, which has passed by then, so that the
   thread does this in processes that only put.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Final

from transferqueue.limits import DEVICE_IDLE_S
from transferqueue.storage.devices.accelerator import Accelerator, CopyEvent
from transferqueue.storage.devices.registered import give_up_idle

_log: Final = logging.getLogger("transferqueue.client")

EXIT_S: Final = 5.0
"""The interpreter's exit waits this long for copies under way."""


class InFlight:
    """The copies of one device that have begun and not ended. Safe from any thread. `idle` is called after `idle_s`
    without a copy."""

    def __init__(self, name: str, idle: Callable[[], object], idle_s: float = DEVICE_IDLE_S) -> None:
        self._name, self._idle, self._idle_s = name, idle, idle_s
        self._copies: SimpleQueue[tuple[CopyEvent, list[object], Sequence[Callable[[], object]]]] = SimpleQueue()
        self._guard = threading.Lock()
        self._thread: threading.Thread | None = None
        self._held = 0
        self._ended = threading.Condition(self._guard)
        self._pid = os.getpid()

    @property
    def held(self) -> int:
        """Copies whose memory is held."""
        return self._held

    @property
    def of_this_process(self) -> bool:
        """False in a forked child: its parent has the thread."""
        return os.getpid() == self._pid

    def hold(self, event: CopyEvent, memory: list[object], ended: Sequence[Callable[[], object]] = ()) -> None:
        """Keep `memory`, a list that the caller gives away, until the event has passed. Then call each of `ended`.

        If the system starts no further thread, a warning is logged, and the memory is kept until a thread starts at a
        later call.
        """
        with self._guard:
            self._held += 1
            self._copies.put((event, memory, ended))
            if self._thread is None:
                self._start()

    def drain(self, timeout_s: float) -> bool:
        """Wait until no copy is under way, at most `timeout_s`. Returns whether that is so."""
        if not self.of_this_process:
            return True
        with self._guard:
            return self._ended.wait_for(lambda: not self._held, timeout_s)

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name=f"copies to {self._name}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            _log.warning(
                "no thread waits for the copies of device %s, so their memory stays until the next copy: %s",
                self._name,
                error,
            )
            return
        self._thread = thread
        atexit.register(self.drain, EXIT_S)

    def _run(self) -> None:
        while self._step():
            pass

    def _step(self) -> bool:
        """Wait for one copy. False if none came for a while: then this thread ends."""
        try:
            event, memory, ended = self._copies.get(timeout=self._idle_s)
        except Empty:
            return self._pause()
        try:
            self._call(event.wait, "failed while it copied")
            memory.clear()
            for end in ended:
                self._call(end, "cannot end the use of registered pages")
        finally:
            with self._guard:
                self._held -= 1
                self._ended.notify_all()
        return True

    def _pause(self) -> bool:
        self._call(self._idle, "cannot give up its registered pages")
        with self._guard:
            if self._held:
                return True
            self._thread = None
            atexit.unregister(self.drain)
        return False

    def _call(self, step: Callable[[], object], failure: str) -> None:
        """Run one step. Its error is logged and does not end the thread, which other copies need."""
        try:
            step()
        except Exception as error:  # noqa: BLE001  (logged; a device raises what it likes)
            _log.warning("device %s %s: %s", self._name, failure, error, exc_info=True)


_known: Final[weakref.WeakKeyDictionary[Accelerator, InFlight]] = weakref.WeakKeyDictionary()
_guard: Final = threading.Lock()


def in_flight(device: Accelerator) -> InFlight:
    """The copies of a device that this process has begun."""
    with _guard:
        copies = _known.get(device)
        if copies is None or not copies.of_this_process:
            copies = _known[device] = InFlight(device.name, give_up_idle)
    return copies
