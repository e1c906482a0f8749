"""The API for threads is the one for event loops without `await`."""

import pytest

from tests.sync_api import CLIENT, MODULES, sync_text


@pytest.mark.parametrize("name", MODULES)
def test_the_api_for_threads_is_as_written_from_the_one_for_event_loops(name):
    written = (CLIENT / "sync" / f"{name}.py").read_text()
    assert written == sync_text(name), "change client/aio, then run python -m tests.sync_api"


def test_each_module_is_written_from_the_other_folder_or_known_to_stand_alone():
    aio, sync = ({path.stem for path in (CLIENT / folder).glob("*.py")} for folder in ("aio", "sync"))
    assert aio == {*MODULES, "__init__", "loader", "awaitable"}
    assert sync == {*MODULES, "__init__", "loader"}
