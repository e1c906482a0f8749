"""The results of `Queue.snapshot` and `Queue.restore`."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from transferqueue.wire.answers.answer import Answer


class StoredSnapshot(Answer, frozen=True, kw_only=True):
    """The snapshot of one coordinator. It is a path: `Queue.restore`, `pathlib.Path` and `open` take it."""

    path: Annotated[str, "Its directory, at the server."]
    made_at: Annotated[datetime | None, "When it was made, in UTC. None: `timeout_s` was 0."] = None

    def __fspath__(self) -> str:
        return self.path
