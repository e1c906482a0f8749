"""The API for threads is the one for event loops without `await`."""

import pytest

from tests.sync_api import CLIENT, MODULES, WRITTEN, sync_text


@pytest.mark.parametrize("module", WRITTEN, ids=lambda module: "/".join(module.parts[-3:]))
def test_the_api_for_threads_is_as_written_from_the_one_for_event_loops(module):
    assert module.read_text() == sync_text(module), f"change {WRITTEN[module]}, then run python -m tests.sync_api"


def test_each_module_is_written_from_the_other_folder_or_known_to_stand_alone():
    aio, sync = ({path.stem for path in (CLIENT / folder).glob("*.py")} for folder in ("aio", "sync"))
    assert aio == {*MODULES, "__init__", "loader", "awaitable"}
    assert sync == {*MODULES, "__init__", "loader"}
