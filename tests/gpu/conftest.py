"""The list for a real device runs where CUDA is; ``--dry`` runs its code on the host, without its figures."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--dry", action="store_true", help="tests/gpu: on the host, to see that the list itself runs")


def pytest_report_header() -> str:
    usable = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no CUDA device"
    return f"on a GPU: {sys.executable}, torch {torch.__version__}, {usable}"


@pytest.fixture(scope="session")
def cuda() -> None:
    """Skips where there is no GPU. Fails where there is one that this torch cannot use: a list that was skipped there
    would pass for shown."""
    if torch.cuda.is_available():
        return
    if Path("/dev/nvidiactl").exists():
        pytest.fail(
            f"this machine has an NVIDIA driver, but torch {torch.__version__} of {sys.executable} finds no CUDA "
            "device; name a Python whose torch does: make test-gpu GPU_PYTHON=/path/to/python"
        )
    pytest.skip("there is no CUDA device")
