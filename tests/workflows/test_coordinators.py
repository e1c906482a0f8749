"""A job on several coordinators: its table and the channel that is its clock are at one of them."""

from pathlib import Path

import numpy as np
import pytest

import transferqueue as tq
from tests.client.test_coordinators import Deployed
from transferqueue.workflows.job.demo import demo_job
from transferqueue.workflows.job.graph import create_table
from transferqueue.workflows.job.names import POLICY
from transferqueue.workflows.job.settings.read import checked

pytestmark = pytest.mark.slow


def test_the_policy_is_the_clock_of_the_jobs_table(tmp_path: Path) -> None:
    with Deployed(tmp_path, ["1/2", "2/2"]) as two, tq.connect(two.address) as queue:
        table = create_table(queue, checked(demo_job(tmp_path)))
        queue.weights(POLICY).publish(4, {"w": np.ones(2)})
        assert table.stats().version == 4
