"""Two hosts, as network namespaces: remote puts and gets cross, flat in fields, and nothing piles up at the server."""

import pytest

from bench.harness import load_results
from bench.namespaces import inside, why_not

MIB = 1 << 20
BUSY = 0.1
"""Of the stream, on a machine that does something else too; on a quiet one the figure to reach is 0.7
(`bench/records`)."""


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_hosts(tmp_path):
    if reason := why_not():
        pytest.skip(f"no network namespaces here: {reason}")
    told = ("--turns", "2", "--mib", "24", "--workloads", "dense_1", "dense_128", "--no-encrypted")
    inside("bench.hosts", "--inside", *told, "--out", str(tmp_path / "hosts.json"), timeout_s=280)
    _, results = load_results(tmp_path / "hosts.json")
    found = {(one.scenario, one.workload, one.metric): one for one in results}
    assert results
    assert all(one.checked is not False and one.raw for one in results)
    for metric in ("get", "put"):
        assert max(found["hosts", "dense_1", f"{metric}_of_stream"].raw) > BUSY
        assert found["hosts", "dense_128", f"{metric}_flat"].raw[0] < 5
    assert 0.3 < found["hosts", "400mbit", "slow_get"].raw[0] < 1.1, "the link was slow, and used"
    assert found["hosts", "400mbit", "slow_held"].raw[0] < 16 * MIB
    assert found["hosts", "3_readers", "stalled_held"].raw[0] < 3 * 12 * MIB
