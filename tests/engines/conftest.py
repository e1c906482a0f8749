from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.engines import conform


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--conformance", metavar="DIR", help="write what the conformance kits found as records")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """vLLM leaves a context of ZeroMQ to the garbage collector, which may come to it in any later test, and its core,
    which computes in this process on a CPU, looks at names of torch that torch gives up."""
    if find_spec("vllm") is not None:
        for item in (item for item in items if Path(__file__).parent in item.path.parents):
            item.add_marker(pytest.mark.filterwarnings("ignore:Unclosed context:ResourceWarning"))
            item.add_marker(pytest.mark.filterwarnings("ignore:.*reduce_op.*:FutureWarning"))


def pytest_sessionfinish(session: pytest.Session) -> None:
    if directory := session.config.getoption("--conformance", default=None):
        conform.write(Path(directory))
