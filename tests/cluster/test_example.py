"""The example of a queue on a Ray cluster runs as a reader would run it: make test-ray."""

import os
import subprocess
import sys

import pytest

from tests.markdown import ROOT

pytest.importorskip("ray", reason="make test-ray has Ray")


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_ray_cluster_goes_on_after_its_server_is_killed(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "ray_cluster.py", "--rows", "200"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env=environment | {"RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "rows put 200, done 200 by 2 workers, all right: True"
