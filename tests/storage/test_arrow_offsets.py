"""Arrow arrays whose offsets are wrong, as a defect of another program makes them: refused before anything is read."""

import ctypes

import numpy as np
import pyarrow as pa
import pytest

from transferqueue.errors import SchemaError
from transferqueue.storage.inputs.arrow import parse_arrow

ARRAYS = {
    pa.list_(pa.int64()): [[1, 2], [3, 4]],
    pa.large_list(pa.int64()): [[1, 2], [3, 4]],
    pa.string(): ["ab", "cd"],
    pa.large_string(): ["ab", "cd"],
    pa.binary(): [b"ab", b"cd"],
    pa.large_binary(): [b"ab", b"cd"],
    pa.list_(pa.list_(pa.int64())): [[[1], [2]], [[3]]],
    pa.map_(pa.int64(), pa.int64()): [[(1, 2)], [(3, 4), (5, 6)]],
}
LARGE = (pa.large_list(pa.int64()), pa.large_string(), pa.large_binary())


@pytest.mark.parametrize("offsets", [(0, 4, 2), (0, 2, 1 << 30), (-5, 2, 4), (3, 3, 11)])
@pytest.mark.parametrize("kind", ARRAYS, ids=str)
def test_wrong_offsets_are_refused(kind, offsets):
    array = pa.array(ARRAYS[kind], kind)
    wrong = np.array(offsets, np.int64 if kind in LARGE else np.int32)
    buffer = array.buffers()[1]
    right = bytes(buffer.to_pybytes()[: wrong.nbytes])
    ctypes.memmove(buffer.address, wrong.tobytes(), wrong.nbytes)
    with pytest.raises(SchemaError, match=r'field "x": the Arrow array is invalid .*make it anew from its source'):
        parse_arrow(array, 'field "x"')
    ctypes.memmove(buffer.address, right, wrong.nbytes)
    parse_arrow(array, 'field "x"')
