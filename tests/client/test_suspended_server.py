"""A server that is suspended, as by SIGSTOP, a debugger or a pause of its machine: live workers keep their leases, dead
ones do not."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import transferqueue as tq
from tests.client.deployments import Worker
from tests.client.test_restart import Supervised
from tests.scale import sizes

LEASED = """
table = queue.table("t")
with table.lease("work", rows=2, timeout_s=20):
    print("leased")
    sys.stdin.readline()
print("acked")
"""


@pytest.fixture(params=["memory", "process"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Supervised]:
    with Supervised(tmp_path, request.param, supervise=False) as found:
        yield found


@pytest.mark.slow
@pytest.mark.parametrize("stopped_s", sizes(5, 13))
def test_a_suspended_server_keeps_the_leases_of_live_workers(server: Supervised, stopped_s: float) -> None:
    with tq.connect(server.address) as queue:
        table = queue.create_table("t", tasks=[tq.Task("work", needs=["x"], lease_s=2.0)])
        table.put(x=[1, 2])
        with ExitStack() as workers:
            alive = workers.enter_context(Worker(server.address, LEASED))
            assert alive.line() == "leased"
            table.put(x=[3, 4])
            dead = workers.enter_context(Worker(server.address, LEASED))
            assert dead.line() == "leased"
            server.process.send_signal(signal.SIGSTOP)
            threading.Event().wait(stopped_s)  # the fault itself
            dead.process.kill()
            server.process.send_signal(signal.SIGCONT)
            alive.tell("go on")
            assert alive.line() == "acked"
            with table.lease("work", rows=2, timeout_s=20) as batch:
                assert batch["x"].numpy().tolist() == [3, 4]
        assert queue.stats().server.leases_ended == 1
        assert queue.audit().balanced


@pytest.mark.slow
def test_a_worker_that_is_suspended_longer_than_its_lease_is_refused(server: Supervised) -> None:
    """The server listened all the time, so it gave the rows to another worker."""
    refused = LEASED.replace("    sys.stdin.readline()", "    pass").replace(
        'with table.lease("work", rows=2, timeout_s=20):', 'batch = table.lease("work", rows=2, timeout_s=20)\nif True:'
    )
    refused += "sys.stdin.readline()\ntry:\n    batch.ack()\nexcept tq.LeaseExpired:\n    print('refused')\n"
    with tq.connect(server.address) as queue:
        table = queue.create_table("t", tasks=[tq.Task("work", needs=["x"], lease_s=0.5)])
        table.put(x=[1, 2])
        with Worker(server.address, refused) as worker:
            assert worker.line() == "leased"
            worker.send(signal.SIGSTOP)
            with table.lease("work", rows=2, timeout_s=20) as batch:
                assert batch["x"].numpy().tolist() == [1, 2]
            worker.send(signal.SIGCONT)
            worker.tell("go on")
            assert worker.line() == "acked"
            assert worker.line() == "refused"
