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
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from transferqueue.errors import OutOfMemory
from transferqueue.storage.dtypes import U8

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


def forget(address: int, nbytes: int, fd: int, offset: int) -> None:
    """Drop this process's private copies of the pages: the next look shows the file as it is then."""
    if _madvise(address, nbytes, mmap.MADV_DONTNEED) != 0:  # refused for memory locked with mlockall
        map_private(fd, offset, nbytes, at=address)


class _Exporter:
    """What the arrays over an address keep alive."""

    __slots__ = ("__array_interface__", "ended", "owner")
    __array_interface__: dict[str, object]
    ended: Callable[[], object] | None
    owner: object

    def __del__(self) -> None:
        """Called exactly once (PEP 442); a tenth of the cost of a `weakref.finalize`, and a batch has hundreds."""
        if self.ended is not None and not sys.is_finalizing():
            self.ended()


def expose(address: int, nbytes: int, ended: Callable[[], object] | None = None, owner: object = None) -> U8:
    """A writable array over raw memory; `ended` is called once, in any thread, when the last view of it is collected.

    owner: kept alive as long as any view. `ended` may run inside a garbage collection at any point of any code of this process: it must take no lock. It does
    not run at interpreter exit.
    """
    exporter = _Exporter()
    exporter.__array_interface__ = {
        "shape": (nbytes,),
        "typestr": "|u1",
        "data": (address, False),
        "version": 3,
    }
    exporter.ended, exporter.owner = ended, owner
    return np.asarray(exporter)
