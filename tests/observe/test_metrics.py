"""Prometheus text of a real queue says what its stats say."""

from __future__ import annotations

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

import transferqueue as tq
from transferqueue.observe.metrics import exposition
from transferqueue.observe.stats import Stats, parse


def test_the_text_of_a_queue_is_read_back_with_its_figures() -> None:
    with tq.connect() as queue:
        table = queue.create_table("rollouts", tasks=[tq.Task("train", needs=["rewards"])])
        table.put(rewards=np.arange(5, dtype=np.float32))
        stats = parse("stats", queue.stats(), Stats)
    families = text_string_to_metric_families(exposition(stats).decode())
    samples = {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}
    assert samples["transferqueue_table_rows_put_total", (("table", "rollouts"),)] == 5
    ready = (("state", "ready"), ("table", "rollouts"), ("task", "train"))
    assert samples["transferqueue_task_rows", ready] == 5
    assert samples["transferqueue_server_used_bytes", ()] == stats.server.used_bytes
