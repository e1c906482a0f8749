"""What tests of channels share."""

import pytest

from transferqueue.transport import Wakeup


@pytest.fixture
def wakeup():
    found = Wakeup()
    yield found
    found.close()
