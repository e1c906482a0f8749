"""A question of a task, and its answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class TaskQuestion(NamedTuple):
    """A question and its only answer, as text. history: messages between the two, each a role and a text. columns:
    further columns of a data row.
    """

    question: str
    answer: str
    history: tuple[tuple[str, str], ...] = ()
    columns: Mapping[str, Any] = {}

    def chat(self) -> list[dict[str, str]]:
        """The messages before the answer, as a chat template takes them."""
        return [{"role": role, "content": text} for role, text in (("user", self.question), *self.history)]
