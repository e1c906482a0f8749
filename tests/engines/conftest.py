from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines import conform


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--conformance", metavar="DIR", help="write what the conformance kits found as records")


def pytest_sessionfinish(session: pytest.Session) -> None:
    if directory := session.config.getoption("--conformance", default=None):
        conform.write(Path(directory))
