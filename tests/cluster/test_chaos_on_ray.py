"""Chaos on a Ray cluster: shards, nodes and the server go while rows pass; each is done once, and what is lost is put
again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="make test-ray has Ray")

from bench.ray_chaos import first_lease, local_cluster, run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(280),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # Ray leaves files to the collector
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
SECONDS = 20.0
FIRST_LEASE_S = 60.0
"""Far above what it takes (1 to 3 s), so that a busy machine passes: `python -m bench.ray_chaos` measures it."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    directory: Path = tmp_path_factory.mktemp("run")
    directory.chmod(0o700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRANSFERQUEUE_RUNTIME", str(directory))
        with local_cluster() as cluster:
            yield cluster


def test_the_first_lease_is_soon(cluster: Any) -> None:
    took = first_lease()
    print(f"deploy_ray to first lease: {took:.2f} s")
    assert took < FIRST_LEASE_S


@pytest.mark.parametrize("replicas", [1, 2])
def test_each_row_is_done_once_or_counted_and_put_again(cluster: Any, replicas: int) -> None:
    """`run` judges; with two replicas, that nothing is lost either."""
    found = {one.metric: one.raw[0] for one in run(cluster, SECONDS, replicas=replicas)}
    print(found)
    assert found["faults_kill_shard"] >= 1
    assert found["faults_remove_node"] >= 1
    assert found["rows_done"] > 0
