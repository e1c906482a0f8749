"""Service times of the AsyncFlow trace, digitised and reduced to a quarter; `data/SOURCE.md` names the source and the
method."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

ITERATIONS: Final = 3
ROWS_PER_ROLLOUT: Final = 62
"""Rows (micro-batches of 8 samples) that one rollout instance makes in an iteration: 62 x 16 x 8 is a quarter of
32,000."""
INSTANCES: Final = {"rollout": 16, "reference": 8, "reward": 8, "advantage": 8, "train": 5}
"""A quarter of the published 64, 32, 32, 32 and 20, so that two cores carry them."""
BATCH_ROWS: Final = INSTANCES["rollout"] * ROWS_PER_ROLLOUT
RESTART_S: Final = 2.2
"""Median pause of a rollout instance between two iterations in the trace."""
LAG_S: Final = 80.0
"""Seconds from the end of a sample until other stages see it. No service takes this time: the first train step of the
trace starts at 95.9 s, and the services before it take 16 s."""


@cache
def services(stage: str) -> NDArray[np.float64]:
    """Published seconds of each service of `stage`: ``[iterations, instances]`` of rollout, else
    ``[iterations, rows]``."""
    table = pq.read_table(Path(__file__).parent / "data" / "asyncflow_service.parquet")
    of_stage = np.asarray(table["stage"].to_pylist()) == stage
    seconds: NDArray[np.float64] = table["service_s"].to_numpy()[of_stage].astype(np.float64)
    return seconds.reshape(ITERATIONS, -1)
