"""Private mappings of a file, and numpy arrays over raw addresses with a callback when their last view is collected.

`mmap.mmap` does not fit: it duplicates a file descriptor for each mapping (a batch may need hundreds), and views of an
array do not keep its object alive. So this module calls the C library, and makes an array of an address through
``__array_interface__``. numpy, torch and Arrow keep the exporting object alive through any chain of views, and Python
collects it after the last view.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import starmap
from queue import Empty, SimpleQueue
from typing import Any, Final

import numpy as np

from transferqueue.errors import OutOfMemory
from transferqueue.storage.elements.dtypes import U8

_PRIVATE: Final = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0x4000)
_SHARED: Final = mmap.MAP_SHARED | getattr(mmap, "MAP_NORESERVE", 0x4000)
_FIXED: Final = 0x10
_READ_WRITE: Final = mmap.PROT_READ | mmap.PROT_WRITE
_FAILED: Final = ctypes.c_void_p(-1).value


def _library() -> tuple[Any, Any, Any]:
    libc = ctypes.CDLL(None, use_errno=True)
    size, number, address = ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p
    libc.mmap.restype = address
    libc.mmap.argtypes = [address, size, number, number, number, ctypes.c_int64]
    libc.munmap.argtypes = [address, size]
    libc.madvise.argtypes = [address, size, number]
    return libc.mmap, libc.munmap, libc.madvise


_mmap, _munmap, _madvise = _library()


def map_private(fd: int, offset: int, nbytes: int, at: int | None = None) -> int:
    """Map these pages of a file, private and writable, and return the address. `at`: replace the mapping at this
    address."""
    address = _mmap(at, nbytes, _READ_WRITE, _PRIVATE | (_FIXED if at is not None else 0), fd, offset)
    if address is None or address == _FAILED:
        reason = os.strerror(ctypes.get_errno())
        raise OutOfMemory(
            f"{nbytes} bytes of the arena cannot be mapped ({reason}); raise vm.max_map_count or the address-space "
            "limit, or hold fewer batches at once"
        )
    return int(address)


def map_shared(fd: int, nbytes: int) -> int:
    """Map the first `nbytes` of a file, shared and writable, and return the address. Takes address space, and no
    page."""
    address = _mmap(None, nbytes, _READ_WRITE, _SHARED, fd, 0)
    if address is None or address == _FAILED:
        reason = os.strerror(ctypes.get_errno())
        raise OutOfMemory(
            f"{nbytes} bytes of the arena cannot be mapped for a device ({reason}); raise the address-space limit"
        )
    return int(address)


def unmap(address: int, nbytes: int) -> None:
    """Remove a mapping. No view of it may be used afterwards."""
    _munmap(address, nbytes)


def unmap_once(address: int, nbytes: int) -> Callable[[], object]:
    """A function that removes a mapping at its first call and does nothing afterwards.

    Each call is a single call of C code, so an interrupt comes before or after it: the mapping is always removed, and
    never twice.
    """
    return partial(deque, starmap(_munmap, iter([(address, nbytes)])), 0)


def drop_pages(address: int, nbytes: int, fd: int, offset: int) -> None:
    """Drop this process's private copies of the pages. The next access reads the file as it is then."""
    if _madvise(address, nbytes, mmap.MADV_DONTNEED) != 0:  # refused for memory locked with mlockall
        map_private(fd, offset, nbytes, at=address)


class _Watch(weakref.ref[Any]):
    """A weak reference with a callback for the collection of its object."""

    __slots__ = ("ended",)
    ended: Callable[[], object] | None

    def end(self) -> None:
        """Call the callback. An interrupt may stop it at any instruction; then it is called again."""
        ended = self.ended
        if ended is not None and not sys.is_finalizing():
            ended()
            self.ended = None


class _Exporter:
    """The object that all arrays over one address keep alive."""

    __slots__ = ("__array_interface__", "__weakref__", "owner", "watch")
    __array_interface__: dict[str, object]
    owner: object
    watch: _Watch | None

    def __del__(self) -> None:
        """Call the callback. Python calls this once (PEP 442). It costs a tenth of a `weakref.finalize`, and a batch
        has hundreds.

        An interrupt (KeyboardInterrupt, or an error of another signal handler) may stop it before its first
        instruction; Python prints the error and goes on. So C code, which no interrupt stops, then puts the watch into
        `_collected`.
        """
        if self.watch is not None:
            self.watch.end()


_watches: Final[dict[int, _Watch]] = {}
"""Keeps the watches alive: Python does not call the callback of a weak reference that was collected itself."""
_collected: Final[SimpleQueue[_Watch]] = SimpleQueue()
"""Watches of collected objects. `end_interrupted` calls the callbacks that an interrupt stopped."""


def when_gone(subject: object, ended: Callable[[], object]) -> _Watch:
    """Make `end_interrupted` call `ended` after `subject` was collected, in case an interrupt stopped the subject's own
    finalizer. `ended` must do nothing if that finalizer has done its work."""
    watch = _Watch(subject, _collected.put)
    watch.ended = ended
    _watches[id(watch)] = watch
    return watch


def end_interrupted() -> None:
    """Call the callbacks of collected objects whose finalizer was interrupted. Any thread may call this; only a thread
    that handles no signals (any but the main thread) cannot be interrupted again."""
    with suppress(Empty):  # another thread took the last one
        while not _collected.empty():
            watch = _collected.get_nowait()
            _watches.pop(id(watch), None)
            watch.end()


def array_at(address: int, nbytes: int, ended: Callable[[], object] | None = None, owner: object = None) -> U8:
    """A writable array ``uint8 [nbytes]`` over raw memory. `ended` is called, in any thread, when its last view is
    collected.

    `owner` is kept alive as long as any view. `ended` may run inside a garbage collection at any point of this
    process's code, so it must take no lock. If an interrupt stops it, it is called again, so it must be safe to repeat.
    It is not called at interpreter exit.
    """
    exporter = _Exporter()
    exporter.__array_interface__ = {
        "shape": (nbytes,),
        "typestr": "|u1",
        "data": (address, False),
        "version": 3,
    }
    exporter.owner, exporter.watch = owner, None
    if ended is not None:
        exporter.watch = when_gone(exporter, ended)
    return np.asarray(exporter)


def memory_address(memory: np.ndarray[Any, Any]) -> int:
    """The address of an array's memory."""
    return int(memory.__array_interface__["data"][0])


def end_of_views(memory: np.ndarray[Any, Any]) -> Callable[[], object] | None:
    """The `ended` of `array_at` for this memory; None for other memory."""
    base: Any = memory
    while isinstance(base, np.ndarray):
        base = base.base
    return base.watch.ended if isinstance(base, _Exporter) and base.watch is not None else None
