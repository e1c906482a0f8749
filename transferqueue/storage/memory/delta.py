"""Differences between two contents of a block: which elements changed, and by how much.

A content is divided into sections of equal length (`section_bytes`), and its difference has a section for each, one
after the other, so that a part of a content needs only some of them. A section is a head and three streams, each
compressed (zstd):

- the gaps between the positions of changed elements, a byte each; 255 stands for a gap in the next stream,
- gaps of 255 and more, as uint32,
- for each changed element the difference of its bits as an unsigned integer, folded so that small differences of both
  signs have few bits (1, -1, 2, … as 1, 2, 3, …): first the lowest bytes of all, then the next ones.

A step of an optimizer mostly moves a bf16 weight to one of its neighbours, or not at all. So the gaps take about 7 bits
where one weight in fifty changed, and the differences 1 or 2. What lost: the xor of all bytes, compressed: it takes
twice the bytes, since zstd does not see elements, and its time is that of the whole content, not of what changed.
Comparing words of 8 bytes before elements: numpy finds the changed ones of a mask as fast as it compares.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from transferqueue.errors import Corruption
from transferqueue.limits import DELTA_SECTIONS_MAX, MIB
from transferqueue.schema import align
from transferqueue.storage.elements.dtypes import U8

CHANGED_SHARE_MAX: Final = 0.5
"""With more changed elements than this a difference is no shorter than the content, or takes longer than it saves."""
BYTES_SHARE_MAX: Final = 0.5
"""A longer difference, against the content, is none."""
_SECTION_BYTES_MIN: Final = MIB
_HEAD: Final = struct.Struct("<BBxxIQQIII")
"""Format, bytes of an element, long gaps, bytes of the content, changed elements, and the length of each stream."""
_FORMAT: Final = 2
_ESCAPE: Final = 255
_LEVEL: Final = 1
_PIECE_ELEMENTS: Final = 1 << 17
"""Compared at once: the mask of a piece, and both contents, fit into the cache."""
_SAMPLES: Final = 16
_SAMPLE_BYTES: Final = 8192
_ELEMENTS: Final = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class Delta(NamedTuple):
    """A difference, and the byte at which each of its sections ends."""

    data: U8
    ends: list[int]


class Moves(NamedTuple):
    """What changed in a content of elements of `size` bytes: the positions, ascending, and what is added to each."""

    size: int
    positions: NDArray[np.int64]
    added: NDArray[Any]


def section_bytes(nbytes: int) -> int:
    """The length of each section of a content, of which the last may be shorter."""
    return max(_SECTION_BYTES_MIN, align(-(-nbytes // DELTA_SECTIONS_MAX)))


def encode_delta(content: U8, after: U8, itemsize: int) -> Delta | None:
    """Make `content` into `after`, in place, and return the difference. Both are of one length, a multiple of 8 bytes.

    None if so much changed that the content itself is to be preferred (a sample of both says so in microseconds), or
    nothing: then some of `content` may be as before, and some as after.

    Args:
        content: the content that the difference is to be applied to.
        after: the result.
        itemsize: bytes of an element.
    """
    size = itemsize if itemsize in _ELEMENTS else 1
    if _changed_in_sample(content, after, size) > CHANGED_SHARE_MAX:
        return None
    pieces, ends, changed, step = list[bytes](), list[int](), 0, section_bytes(len(after))
    for at in range(0, len(after), step):
        section = slice(at, at + step)
        moves = _advance(content[section], after[section], size)
        changed += len(moves.positions)
        if changed * size > CHANGED_SHARE_MAX * len(after):
            return None
        pieces += _encoded(moves, len(after[section]))
        ends.append(sum(map(len, pieces)))
    if not changed or ends[-1] > BYTES_SHARE_MAX * len(after):
        return None
    return Delta(np.frombuffer(b"".join(pieces), np.uint8), ends)


def apply_delta(content: U8, delta: U8) -> list[Moves]:
    """Make the content before into that after, in place, and return what changed. `Corruption` if it is no difference
    of such a content."""
    applied = list[Moves]()
    for moves in read_delta(delta, len(content)):
        elements: NDArray[Any] = content.view(_ELEMENTS[moves.size])
        elements[moves.positions] += moves.added
        applied.append(moves)
    return applied


def undo_delta(content: U8, delta: U8) -> None:
    """Make the content after into that before, in place."""
    for moves in read_delta(delta, len(content)):
        elements: NDArray[Any] = content.view(_ELEMENTS[moves.size])
        elements[moves.positions] -= moves.added


def read_delta(delta: U8, nbytes: int, first: int = 0, last: int | None = None) -> Iterator[Moves]:
    """What each section changes in contents of `nbytes`. `Corruption` if it is no difference of such a content.

    Args:
        delta: the difference, or only its sections from `first` on.
        nbytes: bytes of the content.
        first: the first section that is read; default 0.
        last: the one after those that are read; default None: all.
    """
    step, at = section_bytes(nbytes), 0
    for begin in range(first * step, nbytes if last is None else min(last * step, nbytes), step):
        moves, length = _decoded(delta[at:], min(step, nbytes - begin))
        at += length
        yield moves._replace(positions=moves.positions + begin // moves.size)


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


def _advance(content: U8, after: U8, size: int) -> Moves:
    """What makes a section of `content` into that `after`, which it then is."""
    old, new = content.view(_ELEMENTS[size]), after.view(_ELEMENTS[size])
    found, differs = list[NDArray[np.int64]](), np.empty(min(len(new), _PIECE_ELEMENTS), bool)
    for at in range(0, len(new), _PIECE_ELEMENTS):
        piece = slice(at, at + _PIECE_ELEMENTS)
        mask = np.not_equal(old[piece], new[piece], out=differs[: len(new[piece])])
        found.append(np.flatnonzero(mask) + at)
    positions = found[0] if len(found) == 1 else np.concatenate(found)
    values = new[positions]
    added = values - old[positions]
    old[positions] = values
    return Moves(size, positions, added)


def _encoded(moves: Moves, nbytes: int) -> list[bytes]:
    """The head and the streams of a section with `nbytes` of content."""
    short, long = _gaps_of(moves.positions)
    streams = [_compressed(stream) for stream in (short, long, _planes(_folded(moves.added), moves.size))]
    return [_HEAD.pack(_FORMAT, moves.size, len(long), nbytes, len(short), *map(len, streams)), *streams]


def _decoded(section: U8, nbytes: int) -> tuple[Moves, int]:
    """What the section changes in its `nbytes` of content, and its length."""
    try:
        form, size, long_gaps, content, changed, *lengths = _HEAD.unpack_from(section.data)
    except struct.error as error:
        raise _damaged(f"a section of it has {len(section)} bytes") from error
    if form != _FORMAT or size not in _ELEMENTS or content != nbytes or changed * size > nbytes or long_gaps > changed:
        raise _damaged(f"format {form} of {content} bytes in elements of {size}, where {nbytes} bytes are expected")
    at, streams = _HEAD.size, list[U8]()
    if at + sum(lengths) > len(section):  # a block is padded
        raise _damaged(f"its streams have {sum(lengths)} of {len(section)} bytes")
    for length, whole in zip(lengths, (changed, 4 * long_gaps, changed * size), strict=True):
        streams.append(_decompressed(section[at : at + length], whole))
        at += length
    positions = _positions_of(streams[0], streams[1].view("<u4"))
    if len(positions) and positions[-1] >= nbytes // size:
        raise _damaged(f"element {positions[-1]} of {nbytes // size}")
    folded = np.ascontiguousarray(streams[2].reshape(size, changed).T).view(_ELEMENTS[size])
    return Moves(size, positions, _unfolded(folded)), at


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
