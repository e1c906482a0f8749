"""The advantage stage: apart from the others, since it needs neither a model nor the problems."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import transferqueue as tq
from transferqueue.workflows.grpo.advantages import group_advantages
from transferqueue.workflows.stage import Context, Work


@contextmanager
def advantage(context: Context) -> Iterator[Work]:
    """Factory of ``advantage``: how much better than its group each row did. Its task must ask for complete groups."""

    def compare(batch: tq.Batch) -> Mapping[str, Any]:
        return {"advantages": group_advantages(batch["rewards"].numpy(), batch.group_id)}

    yield compare
