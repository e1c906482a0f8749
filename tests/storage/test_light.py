"""Storage works without torch and pyarrow, and loads neither until a value of theirs is asked for."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys
for name in ("torch", "pyarrow", "ml_dtypes"):
    sys.modules[name] = None  # importing it raises ImportError

import numpy as np
from tests.storage.shards import opened_shard
from transferqueue.errors import SchemaError
from transferqueue.schema import Field

columns = {
    "tokens": [[1, 2], [3]], "text": ["a", "b"], "raw": [b"a", b""], "plain": [{"a": [1]}, None],
    "images": [np.ones((1, 2, 3)), np.ones((2, 1, 3))], "dense": np.ones((2, 3)), "reward": [0.5, 1.0],
}
with opened_shard() as shard:
    blocks = shard.put(columns)
    for name, wanted in columns.items():
        for at in ([(0, 0), (0, 1)], [(0, 1), (0, 0)]):
            found = shard.column(name, blocks, at).list()
            assert repr(found) == repr([np.asarray(wanted[slot]).tolist() if isinstance(wanted[slot], np.ndarray)
                                        else wanted[slot] for _, slot in at]), (name, found)
    assert shard.column("tokens", blocks).padded().tolist() == [[1, 2], [3, 0]]
    try:
        shard.put({"x": [1.5]}, [Field("x", "bfloat16")])
    except SchemaError as error:
        print(error)
"""


def test_without_torch_and_pyarrow() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Python numbers become bfloat16 only with torch or ml_dtypes; install one, or give arrays" in done.stdout


def test_importing_storage_loads_neither() -> None:
    script = "import sys, transferqueue.storage; print(sorted({'torch', 'pyarrow', 'ml_dtypes'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
