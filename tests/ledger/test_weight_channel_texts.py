"""What `doctor` says about a weight channel: versions, who generates with which, who never applied one, update slots,
waits.
"""

from __future__ import annotations

import threading
import time

import numpy as np

import transferqueue as tq
from transferqueue.limits import COPIED_BYTES_MAX
from transferqueue.observe.diagnosis import Diagnosis, diagnose


def told(queue: tq.Queue) -> Diagnosis:
    return diagnose(queue.doctor())


def test_a_channel_is_told_version_by_version() -> None:
    with (
        tq.connect(label="trainer") as queue,
        tq.connect(queue.address, label="fast") as fast,
        tq.connect(queue.address, label="slow") as slow,
        tq.connect(queue.address, label="reader") as reader,
    ):
        policy = queue.weights("policy")
        assert told(queue).channels == {}
        policy.publish(0, {"w": np.ones(4)})
        assert "no reader has applied a version" in [one.text for one in told(queue).channels["policy"]]
        slow.weights("policy").applied(0)
        for version in (1, 2):
            policy.publish(
                version, {"w": np.full(COPIED_BYTES_MAX, float(version))}
            )  # a small one is copied, and not held
        fast.weights("policy").applied(2)
        held = reader.weights("policy").pull()
        with fast.weights("policy").turn(length_s=60):
            texts = [one.text for one in told(queue).channels["policy"]]
        held.release()
    assert [text.rpartition(", for ")[0] or text for text in texts] == [
        "version 2 is the latest, published 0 s ago",
        "fast generates with version 2",
        "slow generates with version 0, 2 behind",
        "reader has pulled a version and never applied one",
        "fast has an update slot",
    ]


def test_who_waits_for_which_version_and_for_whose_turn_is_told() -> None:
    with (
        tq.connect(label="trainer") as queue,
        tq.connect(queue.address, label="first") as first,
        tq.connect(queue.address, label="second") as second,
    ):
        policy = queue.weights("policy")
        policy.publish(0, {"w": np.ones(4)})

        def wait() -> None:
            with second.weights("policy").turn(timeout_s=60):
                second.weights("policy").pull(version=1, timeout_s=60).release()

        with first.weights("policy").turn(length_s=60):
            waiting = threading.Thread(target=wait)
            waiting.start()
            why = _told_with(queue, "update at once")
            assert why.startswith('channel "policy" lets 1 update at once, and first do;')
        why = _told_with(queue, "version 1")
        assert why.startswith('channel "policy" does not have version 1: its latest is 0 (second has waited')
        policy.publish(1, {"w": np.zeros(4)})
        waiting.join(60)
    assert not waiting.is_alive()


def _told_with(queue: tq.Queue, part: str) -> str:
    """What is told elsewhere, once somebody waits for that."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        for one in told(queue).elsewhere:
            if part in one.text:
                return one.text
    raise AssertionError(f"nobody waits for {part!r}")
