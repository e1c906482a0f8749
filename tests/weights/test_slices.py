"""Tensors in slices, and versions that several processes publish together."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import transferqueue as tq
from tests.client.deployments import served
from transferqueue.client.sync.weight_channel import WeightChannel

ROWS, WIDTH = 10, 64


@pytest.fixture
def queue() -> Iterator[tq.Queue]:
    with tq.connect(arena_bytes="64MiB") as queue:
        yield queue


@pytest.fixture
def other(queue: tq.Queue) -> Iterator[tq.Queue]:
    with tq.connect(queue.address) as other:
        yield other


def matrix(value: float = 0.0, rows: int = ROWS) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.arange(rows * WIDTH, dtype=np.float32).reshape(rows, WIDTH) + value


def part(whole: Any, first: int, last: int) -> tq.WeightSlice:
    return tq.WeightSlice(whole[first:last], first=first, rows=len(whole))


def publish_in_two(first: WeightChannel, second: WeightChannel, version: int, whole: Any, at: int = 6) -> int:
    """Publish as two ranks would; the bytes of both."""
    pending = first.begin(version, parts=2)
    written = second.publish(version, {"w": part(whole, at, len(whole))}, pending=pending, part=1)
    return written + first.publish(version, {"w": part(whole, 0, at), "step": np.int64(version)}, pending=pending)


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("values", "first", "rows", "why"),
    [
        (np.float32(1), 0, 1, "has no rows"),
        ([1.0], 0, 1, "a slice of list has no rows"),
        (np.zeros((0, 2)), 0, 1, "has no rows"),
        (np.zeros((3, 2)), 2, 4, "rows 2 to 5 of a tensor of 4"),
        (np.zeros((3, 2)), -1, 4, "first=-1 is out of range"),
        (np.zeros((3, 2)), 0, "4", "rows='4' is str"),
    ],
)
def test_what_is_no_slice_is_refused(values: Any, first: Any, rows: Any, why: str) -> None:
    with pytest.raises(tq.UsageError, match=why):
        tq.WeightSlice(values, first=first, rows=rows)


@pytest.mark.parametrize(
    ("terms", "why"),
    [
        ({"parts": 0}, "parts=0 is out of range; give 1 to 1024"),
        ({"parts": 2, "length_s": -1.0}, "length_s"),
        ({"parts": 2, "version": -1}, "version=-1"),
    ],
)
def test_what_cannot_be_begun_is_refused(terms: dict[str, Any], why: str, queue: tq.Queue) -> None:
    with pytest.raises(tq.UsageError, match=why):
        queue.weights("policy").begin(**{"version": 1, **terms})


def test_adapters_are_published_in_one_part(queue: tq.Queue) -> None:
    channel = queue.weights("policy")
    channel.publish(0, {"w": matrix()})
    with pytest.raises(tq.UsageError, match='adapter "a" is published in parts'):
        channel.publish(1, {"a": matrix()}, adapter="a", pending=channel.begin(1, parts=1))


@pytest.mark.parametrize(
    ("only", "error", "why"),
    [
        ([], tq.UsageError, "a pull of no tensors"),
        (["v"], tq.NotFound, r"has no tensor v, .*; it has step, w"),
        ({"w": range(4, 12)}, tq.NotFound, "or not these rows of it"),
        ({"step": range(1)}, tq.NotFound, "or not these rows of it"),
        ({"w": range(0, 4, 2)}, tq.UsageError, "a range of its rows with step 1 that is not empty"),
        ({"w": (0, 4)}, tq.UsageError, "a range of its rows with step 1"),
        ({"a b": None}, tq.UsageError, "tensor name"),
    ],
)
def test_what_a_version_does_not_have_cannot_be_pulled(
    only: Any, error: type[Exception], why: str, queue: tq.Queue, other: tq.Queue
) -> None:
    publish_in_two(queue.weights("policy"), other.weights("policy"), 1, matrix())
    with pytest.raises(error, match=why):
        other.weights("policy").pull(only=only, timeout_s=0)
    assert set(queue.weights("policy").pull(timeout_s=0)) == {"w", "step"}


# ---------------------------------------------------------------- versions in parts


def test_two_sessions_publish_one_version(queue: tq.Queue, other: tq.Queue) -> None:
    channel, second, whole = queue.weights("policy"), other.weights("policy"), matrix()
    pending = channel.begin(3, parts=2)
    assert second.publish(3, {"w": part(whole, 6, ROWS)}, pending=pending, part=1) == 4 * WIDTH * 4
    with pytest.raises(tq.DeadlineExceeded):
        second.pull(timeout_s=0)
    assert channel.publish(3, {"w": part(whole, 0, 6)}, pending=pending) == 6 * WIDTH * 4
    with second.pull(timeout_s=0) as weights:
        assert (weights.version, list(weights), len(weights)) == (3, ["w"], 1)
        np.testing.assert_array_equal(weights.numpy()["w"], whole)
        np.testing.assert_array_equal(np.asarray(weights["w"]), whole)
        assert weights.fields()["w"].shape == (ROWS, WIDTH)
        assert "1 tensors" in repr(weights)


def test_part_0_waits_for_the_others_and_names_who_did_not_come(queue: tq.Queue, other: tq.Queue) -> None:
    channel, second, whole = queue.weights("policy"), other.weights("policy"), matrix()
    pending = channel.begin(1, parts=2)
    first = threading.Thread(target=channel.publish, args=(1, {"w": part(whole, 0, 6)}), kwargs={"pending": pending})
    first.start()
    second.publish(1, {"w": part(whole, 6, ROWS)}, pending=pending, part=1)
    first.join(30)
    assert second.pull(timeout_s=0).version == 1
    pending = channel.begin(2, parts=3)
    with pytest.raises(tq.DeadlineExceeded, match=r"version 2 of channel .* lacks parts 1, 2 of 3"):
        channel.publish(2, {"w": part(whole, 0, 6)}, pending=pending, timeout_s=0.01)
    with pytest.raises(tq.VersionGivenUp, match=r"version 2 .* was given up without parts 1, 2 of 3"):
        second.publish(2, {"w": part(whole, 6, ROWS)}, pending=pending, part=1)
    assert second.pull(timeout_s=0).version == 1


def test_a_version_ends_with_the_session_that_began_it(queue: tq.Queue, other: tq.Queue) -> None:
    second, whole = other.weights("policy"), matrix()
    with tq.connect(queue.address, label="rank 0") as gone:
        pending = gone.weights("policy").begin(1, parts=2)
        second.publish(1, {"w": part(whole, 6, ROWS)}, pending=pending, part=1)
        assert queue.stats().channels["policy"].bytes == 4 * WIDTH * 4
    with pytest.raises(tq.VersionGivenUp, match="rank 0, which began it, is gone"):
        second.publish(1, {"w": part(whole, 6, ROWS)}, pending=pending, part=1)
    assert queue.stats().channels["policy"].bytes == 0
    with pytest.raises(tq.DeadlineExceeded, match="nothing was published yet"):
        second.pull(timeout_s=0)


def test_slices_that_stay_are_not_written_again(queue: tq.Queue, other: tq.Queue) -> None:
    channel, second, whole = queue.weights("policy"), other.weights("policy"), matrix(rows=20_000)
    assert publish_in_two(channel, second, 1, whole, at=9_000) > whole.nbytes
    before = second.pull(timeout_s=0)
    changed = whole.copy()
    changed[3] = -1.0
    assert publish_in_two(channel, second, 2, changed, at=9_000) < 9_100 * WIDTH * 4
    weights = second.pull(since=before, timeout_s=0)
    assert weights.changed() == {"w", "step"}
    np.testing.assert_array_equal(weights.numpy()["w"], changed)
    np.testing.assert_array_equal(before.numpy()["w"], whole)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "int8"])
def test_slices_of_any_dtype_are_put_together(dtype: str, queue: tq.Queue) -> None:
    torch = pytest.importorskip("torch", exc_type=ImportError)
    whole = torch.arange(40).reshape(10, 4).to(getattr(torch, dtype))
    channel = queue.weights("policy")
    pending = channel.begin(0, parts=2)
    channel.publish(0, {"w": tq.WeightSlice(whole[7:], 7, 10)}, pending=pending, part=1)
    channel.publish(0, {"w": tq.WeightSlice(whole[:7], 0, 10), "v": whole}, pending=pending)
    with channel.pull(timeout_s=0) as weights:
        assert weights["w"].dtype == whole.dtype
        assert bool((weights["w"].float() == whole.float()).all())
        assert weights.torch().keys() == {"w", "v"}


# ---------------------------------------------------------------- readers


RANGES = (range(40), range(100, 400), range(60, 160))


def test_a_reader_takes_the_rows_that_it_needs(queue: tq.Queue, other: tq.Queue) -> None:
    whole, channel = matrix(rows=400), queue.weights("policy")
    publish_in_two(channel, other.weights("policy"), 1, whole, at=100)
    for rows in RANGES:
        with channel.pull(only={"w": rows}, timeout_s=0) as weights:
            assert list(weights) == ["w"]
            assert weights.fields()["w"].shape == (len(rows), WIDTH)
            np.testing.assert_array_equal(weights.numpy()["w"], whole[rows.start : rows.stop])
    with channel.pull(only=["step"], timeout_s=0) as weights:
        assert {name: int(value) for name, value in weights.items()} == {"step": 1}


def test_a_remote_reader_fetches_only_the_slices_with_its_rows(tmp_path: Path) -> None:
    whole = matrix(rows=4000)
    with served(tmp_path) as server, tq.connect(server.tcp) as one, tq.connect(server.tcp) as two:
        publish_in_two(one.weights("policy"), two.weights("policy"), 1, whole, at=1000)
        with tq.connect(server.tcp, data="remote") as reader:
            for rows in RANGES:
                with reader.weights("policy").pull(only={"w": rows}, timeout_s=0) as weights:
                    np.testing.assert_array_equal(weights.numpy()["w"], whole[rows.start : rows.stop])
                    assert sum(tensor.block.nbytes for tensor in weights._tensors.values()) == 1000 * WIDTH * 4


def test_a_remote_reader_gets_more_tensors_than_one_bulk_read_takes(tmp_path: Path) -> None:
    tensors = {f"w{number}": np.full(number + 1, number, np.float32) for number in range(600)}
    with served(tmp_path) as server, tq.connect(server.tcp) as writer:
        writer.weights("policy").publish(1, tensors)
        with tq.connect(server.tcp, data="remote") as reader, reader.weights("policy").pull(timeout_s=0) as weights:
            assert set(weights) == set(tensors)
            assert all((weights.numpy()[name] == value).all() for name, value in tensors.items())


def test_slices_are_in_snapshots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    whole = matrix()
    with tq.connect() as queue, tq.connect(queue.address) as other:
        publish_in_two(queue.weights("policy"), other.weights("policy"), 5, whole)
        queue.snapshot("kept")
    with tq.connect() as again:
        again.restore("kept")
        np.testing.assert_array_equal(again.weights("policy").pull(timeout_s=0).numpy()["w"], whole)
