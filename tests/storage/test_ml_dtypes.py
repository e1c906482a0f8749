"""bf16 and fp8 as numpy arrays, where ml_dtypes is installed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.storage.shards import Shard
from transferqueue.schema import TORCH_ONLY_DTYPES, Field

ml_dtypes: Any = pytest.importorskip("ml_dtypes")


@pytest.mark.parametrize("dtype", sorted(TORCH_ONLY_DTYPES))
def test_arrays_of_ml_dtypes_come_back_as_they_were(shard: Shard, dtype: str) -> None:
    kind = np.dtype(getattr(ml_dtypes, dtype))
    values = np.array([1, 2, 4, 8], kind)
    dense = shard.round_trip(values)
    assert dense.field == Field("x", dtype)
    assert dense.numpy().dtype == kind
    assert dense.numpy().tobytes() == values.tobytes()
    assert dense.torch().float().tolist() == [1.0, 2.0, 4.0, 8.0]
    ragged = shard.round_trip([values[:1], values[1:][::2]])
    assert ragged.field == Field("x", dtype, (None,))
    assert ragged.padded(1).astype(np.float32).tolist() == [[1.0, 1.0], [2.0, 8.0]]
    assert ragged[1].dtype == kind
    assert shard.round_trip([1, 2.0], Field("x", dtype)).list() == [1.0, 2.0]
