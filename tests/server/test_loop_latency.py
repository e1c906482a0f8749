"""How long turns of the loop take, in buckets of powers of two."""

import pytest

from transferqueue.server.loop_latency import BOUNDS_S, Histogram, Meter


@pytest.mark.parametrize("bucket", range(len(BOUNDS_S)))
def test_a_turn_is_in_the_bucket_whose_bound_is_the_next_above_it(bucket):
    found = Histogram()
    found.add(BOUNDS_S[bucket] * 0.99, "Put")
    assert found.counts[bucket] == sum(found.counts) == 1
    found.add(BOUNDS_S[bucket] * 1.01, "Put")
    assert found.counts[bucket + 1] == 1


def test_the_longest_is_named_and_only_what_kept_the_processor_busy_is_late():
    found = Histogram()
    for seconds, subject in [(0.0, "none"), (100.0, "Put"), (0.03, "Lease")]:
        found.add(seconds, subject)
    assert (found.longest_s, found.longest_of, found.counts[-1], found.counts[0]) == (100.0, "Put", 1, 1)
    found.busy(0.001, "Put")
    found.busy(0.03, "Lease")
    assert (found.busiest_s, found.busiest_of, found.late) == (0.03, "Lease", {"Lease": 1})


def test_a_late_turn_does_not_count_the_processor_time_of_those_before_it():
    now, busy, found = [0.0], [0.0], Histogram()
    meter = Meter(lambda: busy[0])
    meter.start(0.0)
    for _ in range(50):  # a burst of frames, 2 ms each
        now[0], busy[0] = now[0] + 0.002, busy[0] + 0.002
        meter.took(found, now[0] - 0.002, now[0], "Put")
    now[0], busy[0] = now[0] + 0.05, busy[0] + 0.003  # the machine ran something else for 47 ms of the next one
    meter.took(found, now[0] - 0.05, now[0], "Lease")
    assert (found.busiest_of, found.late) == ("Lease", {})
    assert found.busiest_s == pytest.approx(0.003)
    now[0], busy[0] = now[0] + 0.03, busy[0] + 0.03
    meter.took(found, now[0] - 0.03, now[0], "Read")
    assert found.late == {"Read": 1}
