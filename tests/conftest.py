"""What every test shares: property tests that find the same examples on every machine, cheap garbage collection, Ctrl-C
that works."""

import gc
import os
import signal
import tempfile

import pytest
from hypothesis import HealthCheck, settings

# "ci" is what runs unless asked otherwise: the same examples every time, and no deadline, since a busy machine proves
# nothing; "long" finds more of them. HYPOTHESIS_PROFILE=search looks for new failures, at random and for longer.
settings.register_profile(
    "ci", derandomize=True, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("search", deadline=None, print_blob=True, max_examples=2000)
settings.register_profile(
    "long",
    derandomize=True,
    deadline=None,
    print_blob=True,
    max_examples=1000,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

# The models of tests are tiny, and threads of OpenMP that wait for each other burn what others on this machine need.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Tests make their models, and ids such as "models/tiny" are looked up in no hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Tests make the servers that they use; one that the developer's shell names is none of them.
for name in ("TRANSFERQUEUE_ADDRESS", "TRANSFERQUEUE_TOKEN"):
    os.environ.pop(name, None)

# Nor one that runs for this user: each process of a run has a runtime directory of its own, with a short path, as
# sockets need it.
_runtime = tempfile.TemporaryDirectory(prefix="tq-", dir="/tmp")
os.environ["TRANSFERQUEUE_RUNTIME"] = _runtime.name

# A shell starts what it runs in the background deaf to Ctrl-C, and so would be the programs that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Exempt all that was imported from garbage collection: each of many hundred `gc.collect()` took 0.3 s to look
    through it."""
    gc.collect()
    gc.freeze()


NEW_MAX = 100_000
"""One collection looks through so many objects in 20 ms."""


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """So again after a file that left many objects, such as modules; what runs after hundreds of files costs as little
    as alone. Exempted cycles that have no user any more are found then."""
    if (nextitem is None or nextitem.path != item.path) and len(gc.get_objects()) > NEW_MAX:
        gc.unfreeze()
        pytest_collection_finish()
