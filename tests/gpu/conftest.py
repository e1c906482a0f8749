"""The list for a real device runs where CUDA is; ``--dry`` runs its code on the host, without its figures."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--dry", action="store_true", help="tests/gpu: on the host, to see that the list itself runs")
