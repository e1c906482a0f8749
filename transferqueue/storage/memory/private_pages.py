"""Raw private mappings, and numpy arrays over addresses that know when their last view is gone.

`mmap.mmap` cannot serve here: it duplicates a file descriptor per mapping (a batch may need hundreds), and
its object is not what the views of an array keep alive. So mapping is asked of the C library, and an address becomes an
array through ``__array_interface__``: numpy, torch and Arrow all keep the exporting object alive, whatever chain of
views leads to it, and that object ends when the last of them is collected.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import starmap
from typing import Any, Final

import numpy as np

from transferqueue.errors import OutOfMemory
from transferqueue.storage.elements.dtypes import U8

_PRIVATE: Final = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0x4000)
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
    """Address of a new private, writable mapping of these pages of a file; `at`: replaces what is mapped there."""
    found = _mmap(at, nbytes, _READ_WRITE, _PRIVATE | (_FIXED if at is not None else 0), fd, offset)
    if found is None or found == _FAILED:
        reason = os.strerror(ctypes.get_errno())
        raise OutOfMemory(
            f"{nbytes} bytes of the arena cannot be mapped ({reason}); raise vm.max_map_count or the address-space limit, "
            "or hold fewer batches at once"
        )
    return int(found)


def unmap(address: int, nbytes: int) -> None:
    """Remove a mapping. Nothing may look there any more."""
    _munmap(address, nbytes)


def unmapping(address: int, nbytes: int) -> Callable[[], object]:
    """A function that removes a mapping when it is first called, and does nothing after that. Each call is one call of code in C,
    so an interrupt comes before it or after it: the mapping is never left, and never removed twice."""
    return partial(deque, starmap(_munmap, iter([(address, nbytes)])), 0)


def drop_pages(address: int, nbytes: int, fd: int, offset: int) -> None:
    """Drop this process's private copies of the pages: the next look shows the file as it is then."""
    if _madvise(address, nbytes, mmap.MADV_DONTNEED) != 0:  # refused for memory locked with mlockall
        map_private(fd, offset, nbytes, at=address)


class _Watch(weakref.ref[Any]):
    """What is done when an object is gone."""

    __slots__ = ("ended",)
    ended: Callable[[], object] | None

    def end(self) -> None:
        """Do it. An interrupt may stop it at any instruction; then it is done again."""
        ended = self.ended
        if ended is not None and not sys.is_finalizing():
            ended()
            self.ended = None


class _Exporter:
    """What the arrays over an address keep alive."""

    __slots__ = ("__array_interface__", "__weakref__", "owner", "watch")
    __array_interface__: dict[str, object]
    owner: object
    watch: _Watch | None

    def __del__(self) -> None:
        """Called once (PEP 442); a tenth of the cost of a `weakref.finalize`, and a batch has hundreds.

        An interrupt (KeyboardInterrupt, or what another signal handler raises) may stop it before its first instruction. Python
        prints such an error and goes on. So the watch is in `_gone` after that, put there by code in C, which no interrupt stops.
        """
        if self.watch is not None:
            self.watch.end()


_watches: Final[dict[int, _Watch]] = {}
"""A weak reference that is itself collected calls nobody."""
_gone: Final[deque[_Watch]] = deque()
"""Watches of objects that are gone. What an interrupt left undone is done by `end_interrupted`."""
_is_gone: Final[Any] = _gone.append


def when_gone(subject: object, ended: Callable[[], object]) -> _Watch:
    """Have `end_interrupted` call `ended` when `subject` has been collected, after its own finalizer: for one that an interrupt
    may have stopped. `ended` does nothing where that has done all."""
    watch = _Watch(subject, _is_gone)
    watch.ended = ended
    _watches[id(watch)] = watch
    return watch


def end_interrupted() -> None:
    """Do what was to be done for objects that are gone, where an interrupt stopped the finalizer. Any thread may call it; one that
    handles no signals (any but the main thread) does it for good."""
    while _gone:
        try:
            watch = _gone.popleft()
        except IndexError:  # another thread was quicker
            return
        _watches.pop(id(watch), None)
        watch.end()


def array_at(address: int, nbytes: int, ended: Callable[[], object] | None = None, owner: object = None) -> U8:
    """A writable array over raw memory; `ended` is called, in any thread, when the last view of it is collected.

    owner: kept alive as long as any view. `ended` may run inside a garbage collection at any point of any code of this process:
    it must take no lock. It is called again if an interrupt stopped it: what it did before that must do no harm the second time.
    It does not run at interpreter exit.
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
