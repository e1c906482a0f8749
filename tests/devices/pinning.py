"""A device without hardware that pins pages as drivers do: it reads them through io_uring's registered buffers, which
the kernel pins for long (FOLL_LONGTERM), not through the mapping. So a page that the arena's owner returned shows its
old bytes, as to a real device."""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from typing import Any, Final

import numpy as np

from tests.devices.late import LateDevice
from transferqueue.storage.elements.dtypes import U8

_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_LIBC.syscall.restype = ctypes.c_long
SETUP, ENTER, REGISTER = 425, 426, 427
READ_FIXED, WRITE_FIXED = 4, 5


def _call(number: int, *arguments: Any) -> int:
    done = int(
        _LIBC.syscall(
            ctypes.c_long(number), *(ctypes.c_long(one) if isinstance(one, int) else one for one in arguments)
        )
    )
    if done < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return done


class PinnedPages:
    """Pages of this process that the kernel has pinned (one buffer of one ring)."""

    def __init__(self, address: int, nbytes: int) -> None:
        params = ctypes.create_string_buffer(120)
        self._fd = _call(SETUP, 4, params)
        entries = struct.unpack("10I", params.raw[:40])
        self._sq, self._cq = struct.unpack("8I", params.raw[40:72]), struct.unpack("8I", params.raw[80:112])
        size = max(self._sq[6] + 4 * entries[0], self._cq[5] + 16 * entries[1])
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        self._ring = mmap.mmap(self._fd, size, flags)
        self._entries = mmap.mmap(self._fd, 64 * entries[0], flags, offset=0x10000000)
        try:
            _call(REGISTER, self._fd, 0, ctypes.c_char_p(struct.pack("QQ", address, nbytes)), 1)
        except OSError:
            self.close()
            raise

    def read(self, address: int, nbytes: int) -> bytes:
        """The bytes that the device sees."""
        out = os.memfd_create("read")
        try:
            self._move(WRITE_FIXED, out, address, nbytes)
            return os.pread(out, nbytes, 0)
        finally:
            os.close(out)

    def write(self, address: int, data: bytes) -> None:
        """The device writes."""
        source = os.memfd_create("written")
        try:
            os.write(source, data)
            self._move(READ_FIXED, source, address, len(data))
        finally:
            os.close(source)

    def close(self) -> None:
        """Unpin."""
        self._entries.close()
        self._ring.close()
        os.close(self._fd)

    def _number(self, at: int) -> int:
        return int(struct.unpack_from("I", self._ring, at)[0])

    def _move(self, kind: int, file: int, address: int, nbytes: int) -> None:
        struct.pack_into("BBHiQQIIQH", self._entries, 0, kind, 0, 0, file, 0, address, nbytes, 0, 1, 0)
        tail = self._number(self._sq[1])
        struct.pack_into("I", self._ring, self._sq[6] + 4 * (tail & self._number(self._sq[2])), 0)
        struct.pack_into("I", self._ring, self._sq[1], tail + 1)
        _call(ENTER, self._fd, 1, 1, 1, ctypes.c_void_p(0), 0)
        head = self._number(self._cq[0])
        at = self._cq[5] + 16 * (head & self._number(self._cq[2]))
        struct.pack_into("I", self._ring, self._cq[0], head + 1)
        if (result := struct.unpack_from("Qi", self._ring, at)[1]) != nbytes:
            raise OSError(-result, os.strerror(-result) if result < 0 else f"{result} of {nbytes} bytes")


class PinningDevice(LateDevice):
    """Copies at once, through pinned pages. `OSError` where this machine has no io_uring."""

    def __init__(self) -> None:
        super().__init__("pinning:0", at_once=True)
        self.pins: dict[int, PinnedPages] = {}
        probe = mmap.mmap(-1, 4096)
        PinnedPages(np.frombuffer(probe, np.uint8).__array_interface__["data"][0], 4096).close()

    def load(self, into: Any, source: U8) -> None:
        address = source.__array_interface__["data"][0]
        pins = self._pins_of(address, len(source))
        if pins is not None:
            self.direct += len(source)
            source = np.frombuffer(pins.read(address, len(source)), np.uint8)
        np.copyto(into.numpy(), source)

    def store(self, into: U8, source: Any) -> None:
        address = into.__array_interface__["data"][0]
        pins = self._pins_of(address, len(into))
        if pins is None:
            super().store(into, source)
        else:
            self.direct += len(into)
            pins.write(address, source.numpy().tobytes())

    def register(self, address: int, nbytes: int) -> bool:
        super().register(address, nbytes)
        self.pins[address] = PinnedPages(address, nbytes)
        return True

    def unregister(self, address: int, nbytes: int) -> None:
        super().unregister(address, nbytes)
        self.pins.pop(address).close()

    def _pins_of(self, address: int, nbytes: int) -> PinnedPages | None:
        for start, size in self.regions.items():
            if start <= address and address + nbytes <= start + size:
                return self.pins[start]
        return None
