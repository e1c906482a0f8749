"""Differences between two contents of a block: which elements changed, and by how much.

A difference is a head and three streams, each compressed (zstd):

- the gaps between the positions of changed elements, a byte each; 255 stands for a gap in the next stream,
- gaps of 255 and more, as uint32,
- for each changed element the difference of its bits as an unsigned integer, folded so that small differences of both
  signs have few bits (1, -1, 2, … as 1, 2, 3, …): first the lowest bytes of all, then the next ones.

A step of an optimizer mostly moves a bf16 weight to one of its neighbours, or not at all. So the gaps take about 7 bits
where one weight in fifty changed, and the differences 1 or 2. What lost: the xor of all bytes, compressed: it takes
twice the bytes, since zstd does not see elements, and its time is that of the whole content, not of what changed.
"""

from __future__ import annotations

import struct
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from transferqueue.errors import Corruption
from transferqueue.limits import MIB
from transferqueue.storage.elements.dtypes import U8

CHANGED_SHARE_MAX: Final = 0.5
"""With more changed elements than this a difference is no shorter than the content, or takes longer than it saves."""
BYTES_SHARE_MAX: Final = 0.5
"""A longer difference, against the content, is none."""
_HEAD: Final = struct.Struct("<BBxxIQQIII")
"""Format, bytes of an element, long gaps, bytes of the content, changed elements, and the length of each stream."""
_FORMAT: Final = 1
_ESCAPE: Final = 255
_LEVEL: Final = 1
_PIECE_BYTES: Final = MIB
"""Compared at once: both contents of a piece fit into the cache."""
_SAMPLES: Final = 16
_SAMPLE_BYTES: Final = 8192
_ELEMENTS: Final = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def encode_delta(before: U8, after: U8, itemsize: int) -> U8 | None:
    """The difference that makes `before` into `after`, which are of one length, a multiple of 8 bytes.

    None if so much changed that the content itself is to be preferred: a sample of both says so in microseconds.

    Args:
        before: the content that it is to be applied to.
        after: the result.
        itemsize: bytes of an element.
    """
    size = itemsize if itemsize in _ELEMENTS else 1
    if _changed_in_sample(before, after, size) > CHANGED_SHARE_MAX:
        return None
    positions = _changed(before, after, size)
    if len(positions) * size > CHANGED_SHARE_MAX * len(after) or not len(positions):
        return None
    kind = _ELEMENTS[size]
    short, long = _gaps_of(positions)
    moved = _folded(after.view(kind)[positions] - before.view(kind)[positions])
    streams = [_compressed(stream) for stream in (short, long, _planes(moved, size))]
    head = _HEAD.pack(_FORMAT, size, len(long), len(after), len(positions), *map(len, streams))
    delta = np.frombuffer(b"".join([head, *streams]), np.uint8)
    return delta if len(delta) <= BYTES_SHARE_MAX * len(after) else None


def apply_delta(content: U8, delta: U8) -> None:
    """Make the content before into that after, in place. `Corruption` if it is no difference of such a content."""
    size, positions, moved = read_delta(delta, len(content))
    elements: NDArray[Any] = content.view(_ELEMENTS[size])
    elements[positions] += moved


def read_delta(delta: U8, nbytes: int) -> tuple[int, NDArray[np.int64], NDArray[Any]]:
    """The size of an element, the positions of the changed ones, ascending, and what is added to each. `Corruption` if
    it is no difference of contents of `nbytes`."""
    try:
        form, size, long_gaps, content, changed, *lengths = _HEAD.unpack_from(delta.data)
    except struct.error as error:
        raise _damaged(f"it has {len(delta)} bytes") from error
    if form != _FORMAT or size not in _ELEMENTS or content != nbytes or changed * size > nbytes or long_gaps > changed:
        raise _damaged(f"format {form} of {content} bytes in elements of {size}, where {nbytes} bytes are expected")
    if _HEAD.size + sum(lengths) > len(delta):  # a block is padded
        raise _damaged(f"its streams have {sum(lengths)} of {len(delta)} bytes")
    at, streams = _HEAD.size, list[U8]()
    for length, whole in zip(lengths, (changed, 4 * long_gaps, changed * size), strict=True):
        streams.append(_decompressed(delta[at : at + length], whole))
        at += length
    positions = _positions_of(streams[0], streams[1].view("<u4"))
    if len(positions) and positions[-1] >= nbytes // size:
        raise _damaged(f"element {positions[-1]} of {nbytes // size}")
    return size, positions, _unfolded(np.ascontiguousarray(streams[2].reshape(size, changed).T).view(_ELEMENTS[size]))


def _damaged(what: str) -> Corruption:
    return Corruption(f"a difference of weights is damaged: {what}; take the whole version")


def _changed_in_sample(before: U8, after: U8, size: int) -> float:
    """The share of changed elements in pieces that are spread over the content; 0 for one of a few pieces."""
    if len(after) < 4 * _SAMPLES * _SAMPLE_BYTES:
        return 0.0
    step = len(after) // _SAMPLES // 8 * 8
    kind, changed = _ELEMENTS[size], 0
    for at in range(0, _SAMPLES * step, step):
        piece = slice(at, at + _SAMPLE_BYTES)
        changed += int(np.count_nonzero(before[piece].view(kind) != after[piece].view(kind)))
    return changed * size / (_SAMPLES * _SAMPLE_BYTES)


def _changed(before: U8, after: U8, size: int) -> NDArray[np.int64]:
    """Positions of the elements that differ. Words of 8 bytes are compared first: most of them are equal."""
    found: list[NDArray[np.int64]] = []
    per_word = 8 // size
    for at in range(0, len(after), _PIECE_BYTES):
        differs = before[at : at + _PIECE_BYTES].view("<u8") ^ after[at : at + _PIECE_BYTES].view("<u8")
        words = np.flatnonzero(differs != 0)
        if len(words):
            within = np.flatnonzero(differs[words].view(_ELEMENTS[size]) != 0)
            found.append(words[within // per_word] * per_word + within % per_word + at // size)
    return np.concatenate(found) if found else np.empty(0, np.int64)


def _gaps_of(positions: NDArray[np.int64]) -> tuple[U8, NDArray[np.uint32]]:
    gaps = np.diff(positions, prepend=-1) - 1
    # A gap beyond 32 bits is longer than any tensor has elements between two changes: it is refused by its reader.
    return np.minimum(gaps, _ESCAPE).astype(np.uint8), gaps[gaps >= _ESCAPE].astype("<u4")


def _positions_of(short: U8, long: NDArray[np.uint32]) -> NDArray[np.int64]:
    gaps = short.astype(np.int64)
    escaped = short == _ESCAPE
    if np.count_nonzero(escaped) != len(long):
        raise _damaged("its gaps do not fit each other")
    gaps[escaped] = long
    gaps += 1
    return np.asarray(np.cumsum(gaps) - 1, np.int64)


def _folded(moved: NDArray[Any]) -> NDArray[Any]:
    """Differences with their sign in the lowest bit: 0, 1, -1, 2, -2, … become 0, 2, 1, 4, 3, …."""
    bits = 8 * moved.itemsize
    signs = moved >> moved.dtype.type(bits - 1)
    return np.asarray((moved << moved.dtype.type(1)) ^ (~signs + moved.dtype.type(1)))


def _unfolded(folded: NDArray[Any]) -> NDArray[Any]:
    flat = folded.reshape(-1)
    one = flat.dtype.type(1)
    return np.asarray((flat >> one) ^ (~(flat & one) + one))


def _planes(moved: NDArray[Any], size: int) -> U8:
    return np.ascontiguousarray(np.ascontiguousarray(moved).view(np.uint8).reshape(-1, size).T)


def _compressed(stream: NDArray[Any]) -> bytes:
    import pyarrow as pa

    if not stream.size:
        return b""
    return bytes(pa.Codec("zstd", compression_level=_LEVEL).compress(np.ascontiguousarray(stream).data, asbytes=True))


def _decompressed(stream: U8, nbytes: int) -> U8:
    import pyarrow as pa

    if not nbytes:
        return np.empty(0, np.uint8)
    try:
        whole = pa.Codec("zstd").decompress(np.ascontiguousarray(stream).data, decompressed_size=nbytes)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise _damaged(str(error)) from error
    return np.frombuffer(whole, np.uint8)
