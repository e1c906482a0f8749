"""The server's report about a queue's waits: sentences about tasks, and the pipeline on which a verdict is based."""

from __future__ import annotations

from typing import Annotated, Any

from transferqueue.wire.answers.answer import Answer
from transferqueue.wire.answers.sessions import SessionStats
from transferqueue.wire.answers.stats import TaskError, Waiting


class TaskDiagnosis(Answer, frozen=True, kw_only=True):
    """A sentence about a task, or (task "") about the table: what holds up producers, its clock and its end, and which
    share of its rows is dropped."""

    task: Annotated[str, 'Or "": of the table.']
    text: Annotated[str, "The sentence."]
    stranded: Annotated[bool, "Whether the task can never progress."] = False
    unattended_s: Annotated[
        float | None, "Since no worker works on it, though rows are ready. None: one does, or no rows are."
    ] = None
    died: Annotated[bool, "Whether the last worker of an unattended task left without a goodbye."] = False
    errors: Annotated[list[TaskError], "Why its leases failed, the latest first."] = []
    failing: Annotated[bool, "Whether its last leases all failed, which is a stall at once."] = False


class Departed(Answer, frozen=True, kw_only=True):
    """The worker whose session ended last."""

    label: Annotated[str, "Of its session."]
    ago_s: Annotated[float, "Since it ended."]
    how: Annotated[str, "How, as far as that is known."]
    died: Annotated[bool, "Whether it left without a goodbye."] = False


class PipelineStage(Answer, frozen=True, kw_only=True):
    """A task, or (task "") the sessions that put rows."""

    task: Annotated[str, 'Or "": the producers.']
    needs: Annotated[list[str], "Columns that it needs."] = []
    gives: Annotated[list[str], "Columns that it gives."] = []
    lacks: Annotated[dict[str, int], "In a sample of its pending rows, how many lack each column."] = {}
    workers: Annotated[list[int], "Open sessions that have asked for its rows."] = []
    left: Annotated[Departed | None, "The worker whose session ended last."] = None


class TablePipeline(Answer, frozen=True, kw_only=True):
    """The facts on which a verdict about a table is based."""

    stages: Annotated[list[PipelineStage], "The producers, then the tasks as declared."] = []
    ends: Annotated[
        dict[str, int], "Rows of the latest events: `acked` by the pacing task, or why rows did not reach it."
    ] = {}


class DoctorAnswer(Answer, frozen=True, kw_only=True):
    """Who waits for what, and who holds it."""

    now_s: Annotated[float, "The server's clock."]
    tables: Annotated[dict[str, list[TaskDiagnosis]], "By table, a sentence for each task, and for what holds it up."]
    pipelines: Annotated[dict[str, TablePipeline], "By table: see `TablePipeline`."] = {}
    channels: Annotated[
        dict[str, list[str]],
        "By weight channel (none where one table is asked for), sentences: the latest version, who generates with "
        "which and how far behind, who never applied one, who has an update slot, which parts a version lacks.",
    ] = {}
    waiting: Annotated[list[Waiting], "As in `stats`, of the table asked for."] = []
    sessions: Annotated[dict[str, SessionStats], "As of `sessions`."] = {}
    coordinators: Annotated[dict[str, Any], "As of `stats`."] = {}
