from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.storage.shards import Shard, opened_shard


@pytest.fixture
def shard() -> Iterator[Shard]:
    with opened_shard() as found:
        yield found
