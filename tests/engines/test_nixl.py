"""Columns read and put one-sided by NIXL over UCX: over TCP, and by CMA between processes of this host. No RDMA device
is needed, nor shown to work.

`make test-nixl` sets up what this needs. Elsewhere it is skipped.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.engines.nixl_checks import CHECKS
from transferqueue.adapters.carriers.nixl.agent import Transports, check_machine
from transferqueue.transport.bulk.carriers import BYTES_VARIABLE
from transferqueue.transport.system.rdma import rdma_devices

pytest.importorskip("nixl")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("carrier", [Transports.CMA, Transports.TCP])
def test_what_holds_of_one_sided_reads(carrier: Transports, check: str) -> None:
    command = [sys.executable, "-m", "tests.engines.nixl_checks", check]
    ended = subprocess.run(
        command,
        env=os.environ | {BYTES_VARIABLE: str(carrier)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert (ended.returncode, ended.stdout.splitlines()[-1:]) == (0, ["passed"]), ended.stdout + ended.stderr


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("carrier", [Transports.CMA, Transports.TCP])
def test_three_minutes_of_chaos_keep_every_promise(carrier: Transports) -> None:
    """Remote roles put and read large rows one-sided, while server, workers and connections are killed, stopped, cut
    and garbled."""
    ended = subprocess.run(
        [sys.executable, "-m", "tests.chaos", "--tcp", "--seconds", "180", "--seed", "4"],
        env=os.environ | {BYTES_VARIABLE: str(carrier)},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "lost 0, duplicate effects 0, bounds broken 0" in ended.stdout


@pytest.mark.skipif(bool(rdma_devices()), reason="this machine has RDMA")
def test_production_refuses_a_machine_without_rdma() -> None:
    with pytest.raises(ValueError, match=r"no RDMA device with an active port .* use bytes 'stream' here"):
        check_machine(Transports.RDMA)
