"""Statistics and audit: rows, bytes and ages of tables, tasks and weight channels, and of the server's process."""

from __future__ import annotations

from typing import Annotated, Any

from transferqueue.wire.answers.answer import Answer, Total, TotalSeconds


class TaskError(Answer, frozen=True, kw_only=True):
    """Leases of a task that failed alike: one kind of failure, told by its type and text."""

    type: Annotated[str, 'Such as "KeyError"; "" if the text names none.']
    text: Annotated[str, "At most 300 characters."]
    worker: Annotated[str, "Label of the session that reported it last."]
    count: Annotated[int, "Leases that failed so."]
    first_s: Annotated[float, "Since the first of them."]
    last_s: Annotated[float, "Since the last of them."]


class TaskStats(Answer, frozen=True, kw_only=True):
    """One task. The counts up to `kept` are of rows by where they stand now."""

    pending: Annotated[int, "Rows that lack a field the task needs."] = 0
    held: Annotated[int, "Rows that have all fields, but whose group is not whole."] = 0
    retrying: Annotated[int, "Rows whose lease failed, and which wait for their next try as `Task.retry` says."] = 0
    ready: Annotated[int, "Rows that could be leased now (with groups: of whole groups)."] = 0
    leased: Annotated[int, "Rows that are leased."] = 0
    stepped: Annotated[int, "Rows acked with a step that no checkpoint covers yet."] = 0
    kept: Annotated[int, "Rows that are stale under `KeepStale`: never leased again."] = 0
    checkpoint: Annotated[int, "The latest step that a checkpoint covers; -1: none."] = -1
    done: Annotated[Total, "Rows the task was done with."] = 0
    dropped: Annotated[Total, "Rows that were dropped before the task was done with them."] = 0
    given: Annotated[Total, "Rows leased, or set aside for a rank; one given twice counts twice."] = 0
    failed: Annotated[
        Total, "Rows that came back from a lease that failed: an exception in `with batch`, or `release(failed=True)`."
    ] = 0
    worker_deaths: Annotated[
        Total, "Rows that came back since their worker died, went silent, or was over its time limit."
    ] = 0
    retry_s: Annotated[float | None, "Until the first of the rows that wait is tried again."] = None
    paused_s: Annotated[
        float | None,
        "All leases of the task fail, so it is paused: until the next lease is tried (0: now). None: it is not paused.",
    ] = None
    errors: Annotated[list[TaskError], "Why its leases failed, the latest first, at most 8."] = []
    leases: Annotated[int, "Leases that are open."] = 0
    holders: Annotated[list[str], "Names of the sessions that have them."] = []
    oldest_lease_s: Annotated[float | None, "Age of the oldest open lease."] = None
    age_s: Annotated[float | None, "Since the row that is next in line was put."] = None
    groups_ready: Annotated[int | None, "Groups that could be leased now. None: the task takes rows."] = None
    groups_forming: Annotated[int | None, "Groups that are not whole. None: the task takes rows."] = None
    stranded: Annotated[
        bool, "Whether the table is sealed and no row that the task still has can get what it lacks."
    ] = False
    unattended_s: Annotated[
        float | None, "Since rows are ready and no session holds or asks for any. None: a session does, or none are."
    ] = None
    unattended: Annotated[
        str, 'The same in words, with the last worker and how it left as far as that is known, or "".'
    ] = ""


class RowFates(Answer, frozen=True, kw_only=True):
    """Where all rows are that were ever put."""

    rows_put: Annotated[Total, "Rows put."]
    rows_live: Annotated[int, "Rows that are neither done nor dropped."]
    rows_done: Annotated[Total, "Rows with which every task was done."]
    rows_dropped: Annotated[Total, "Rows that ended as dropped."]
    dropped: Annotated[dict[str, int], "The dropped rows by reason."] = {}
    rows_lost: Annotated[
        Total, "The dropped rows whose bytes were lost (with a shard, or damaged) and could not be made again."
    ] = 0
    balanced: Annotated[bool, "`rows_put` = `rows_live` + `rows_done` + `rows_dropped`, each counted on its own."]


class TableAudit(RowFates, frozen=True, kw_only=True):
    """One table in an audit."""

    errors: Annotated[dict[str, list[TaskError]], "Why leases failed, by task; of tasks of which some did."] = {}


class TableStats(RowFates, frozen=True, kw_only=True):
    """One table: what it holds against what it may hold, its clock, its tasks."""

    rows_resident: Annotated[int, "Rows that are live, or finished and kept until deleted."] = 0
    rows_limit: Annotated[int, "Rows that the table may hold."] = 0
    rows_to_record: Annotated[int, "Rows that have ended and that no file contains yet (`Recorded`)."] = 0
    rows_recorded: Annotated[Total, "Rows that a file contains (`Recorded`)."] = 0
    rows_unrecorded: Annotated[
        Total, "Rows that were freed without a file, since the disk failed (`Recorded` with `required=False`)."
    ] = 0
    bytes: Annotated[int, "Bytes of live blocks."] = 0
    bytes_limit: Annotated[int | None, "Bytes of live blocks that the table may hold."] = None
    columns_freed: Annotated[
        Total, "Values that were freed though their rows lived on (`AckedColumns`, `free_columns`)."
    ] = 0
    column_bytes_freed: Annotated[
        Total, "Bytes of the blocks that ended thereby; a block ends with the last of its values."
    ] = 0
    fields: Annotated[dict[str, str], 'The type of each field, such as "int64[None]".'] = {}
    extra_fields: Annotated[bool, "Whether rows may add fields that neither the table nor a task declares."] = True
    groups: Annotated[int, "Groups with a resident row."] = 0
    version: Annotated[int, "The clock: the trainer's version."] = -1
    cursor: Annotated[int, "The lowest ordinal that was not put yet, or of which a row is live."] = 0
    sealed: Annotated[bool, "Whether no more rows may enter."] = False
    replicas: Annotated[int, "Shards that each block is written to."] = 1
    rows_one_copy: Annotated[
        int, "Rows with a value that lies in one shard only, though the table keeps more copies."
    ] = 0
    age_s: Annotated[float | None, "Age of the oldest resident row."] = None
    staleness: Annotated[dict[str, int], "Rows handed to the pacing task, by versions behind the clock then."] = {}
    staleness_in_flight: Annotated[
        dict[str, int], "The same rows by the part of it from their policy version to their response."
    ] = {}
    staleness_in_queue: Annotated[
        dict[str, int], "The same rows by the part of it from their response to the hand-over."
    ] = {}
    max_staleness: Annotated[int | None, "Versions that a row may be behind when it is handed over."] = None
    reserved: Annotated[int, "Rows of reservations that were not put yet."] = 0
    refills: Annotated[int, "Members of incomplete groups that are asked for again."] = 0
    outstanding: Annotated[int, "Rows reserved, or live and not yet done by the pacing task."] = 0
    outstanding_limit: Annotated[int | None, "Rows that may be outstanding."] = None
    pacing_task: Annotated[str | None, "The task that paces production."] = None
    tasks: Annotated[dict[str, TaskStats], "By task."] = {}


class ChannelStats(Answer, frozen=True, kw_only=True):
    """One weight channel. Keys of the dicts by session are session numbers as text."""

    newest: Annotated[int, "Newest version; -1: nothing was published."]
    kept: Annotated[list[int], "Versions that are kept."] = []
    lost: Annotated[dict[str, str], "How versions were lost that went with a shard, by version."] = {}
    bytes: Annotated[int, "Bytes of the versions kept."] = 0
    deltas: Annotated[int, "Differences in the newest version; the late reader applies those after the whole one."] = 0
    deltas_refused: Annotated[int, "How often a difference gave a reader another result than it promised."] = 0
    age_s: Annotated[float | None, "Since the newest version was published."] = None
    applied: Annotated[dict[str, int], "The version that each session generates with."] = {}
    applied_age_s: Annotated[dict[str, float], "Since when, by session."] = {}
    publish_lag_s: Annotated[dict[str, float | None], "How long after its publication, by session."] = {}
    turns: Annotated[dict[str, float], "How long each session with an update slot may still change its weights."] = {}


class BytesStats(Answer, frozen=True, kw_only=True):
    """Extents, blocks and pins of all tables and channels together."""

    extents: Annotated[int, "Extents of the arena that are lent."] = 0
    extents_open: Annotated[int, "Extents that a client may still write."] = 0
    granted: Annotated[int, "Bytes of all extents."] = 0
    blocks: Annotated[int, "Blocks that exist."] = 0
    blocks_pinned: Annotated[int, "Blocks that a session views."] = 0
    to_copy: Annotated[int, "Bytes of blocks that lost a copy and wait for a shard."] = 0
    being_copied: Annotated[int, "Bytes of blocks that shards copy now."] = 0


class Waiting(Answer, frozen=True, kw_only=True):
    """One request that waits at the server."""

    session: Annotated[int, "Number of the session that asked."]
    label: Annotated[str, 'What it was called in `connect(label=…)`, else its process, else "".']
    request: Annotated[str, "Lease, Put, Reserve, Advance, Publish, Pull, OpenTable, Grant."]
    table: Annotated[str, 'Or "".'] = ""
    task: Annotated[str, 'Or "".'] = ""
    waited_s: Annotated[float, "Since it came."]
    left_s: Annotated[float, "Until its deadline."]
    why: Annotated[str, "What is missing, and who holds it."]


class SpillStats(Answer, frozen=True, kw_only=True):
    """Blocks of rows on the server's disk (`serve --spill-dir`). Totals are since the server started."""

    bytes_max: Annotated[int, "Bytes of rows that may be on the disk."] = 0
    blocks: Annotated[int, "Blocks that are on the disk."] = 0
    bytes: Annotated[int, "Bytes of rows that are on the disk."] = 0
    spilled_blocks: Annotated[Total, "Blocks that went to the disk."] = 0
    spilled_bytes: Annotated[Total, "Bytes that went to the disk."] = 0
    loaded_blocks: Annotated[Total, "Blocks that came back."] = 0
    loaded_bytes: Annotated[Total, "Bytes that came back."] = 0
    lost_blocks: Annotated[Total, "Blocks that were unreadable or damaged on the disk."] = 0
    load_waits_s: Annotated[
        TotalSeconds, "How long requests waited for blocks on the disk, each while it was the first in line."
    ] = 0.0
    paused: Annotated[str, 'Why nothing goes to the disk now; "": nothing hinders it.'] = ""


class ShardStats(Answer, frozen=True, kw_only=True):
    """A remote shard. The bytes that clients read and wrote are at most ten seconds old."""

    shard: Annotated[int, "Its number."]
    label: Annotated[str, "What it is called."] = ""
    host: Annotated[str, "Where it runs."] = ""
    endpoint: Annotated[str, "Where it is read and written."] = ""
    capacity_bytes: Annotated[int, "Ceiling of its arena."] = 0
    used_bytes: Annotated[int, "Bytes that blocks and write grants occupy."] = 0
    backed_bytes: Annotated[int, "Bytes that have pages."] = 0
    drains: Annotated[bool, "Whether it is to leave: nothing more of it is lent."] = False
    bulk_sent_bytes: Annotated[dict[str, int], "Bytes that clients read from it, by carrier."] = {}
    bulk_received_bytes: Annotated[dict[str, int], "Bytes that clients wrote to it, by carrier."] = {}


class TurnStats(Answer, frozen=True, kw_only=True):
    """How long one kind of turns of the server's loop took, in which no other request is served."""

    bounds_s: Annotated[list[float], "Upper bounds of the buckets: powers of two."] = []
    counts: Annotated[list[int], "Turns up to each bound, and one more for what took longer."] = []
    sum_s: Annotated[TotalSeconds, "All turns together."] = 0.0
    longest_s: Annotated[float, "The longest turn since the server began."] = 0.0
    longest_of: Annotated[str, "The request that the longest was for."] = ""
    busiest_s: Annotated[float, "The longest by processor time, of those above 20 ms by the clock; 0: none."] = 0.0
    busiest_of: Annotated[str, "The request that it was for."] = ""
    late: Annotated[dict[str, int], "Turns of more than 20 ms of processor time, by what they were for."] = {}


class ServerStats(Answer, frozen=True, kw_only=True):
    """The process that answers, its arena, and what befell it since it started."""

    address: Annotated[str, "Where it is connected to."] = ""
    coordinator: Annotated[str, "Its place, such as `rl:1/2`; `1/1`: it is the only one."] = ""
    version: Annotated[str, "Of the package."] = ""
    pid: Annotated[int, "Its process."] = 0
    bulk_port: Annotated[int, "Where other machines read and write bytes; 0: nowhere."] = 0
    bulk_sent_bytes: Annotated[dict[str, int], "Bytes that they read there, by carrier: `stream`, `one_sided`."] = {}
    bulk_received_bytes: Annotated[dict[str, int], "Bytes that they wrote there, by carrier."] = {}
    uptime_s: Annotated[float, "Age of the server's process."] = 0.0
    capacity_bytes: Annotated[int, "Ceiling of the arena."] = 0
    used_bytes: Annotated[int, "Bytes of the arena that blocks and write grants occupy."] = 0
    backed_bytes: Annotated[int, "Bytes of the arena that have pages."] = 0
    extents: Annotated[int, "Extents of the arena."] = 0
    shards: Annotated[list[ShardStats], "Remote shards."] = []
    spill: Annotated[SpillStats | None, "Rows on the disk; None without `--spill-dir`."] = None
    calls: Annotated[Total, "Requests that were carried out."] = 0
    garbage: Annotated[Total, "Frames that were no message."] = 0
    repeated: Annotated[Total, "Requests that came again."] = 0
    leases_ended: Annotated[Total, "Leases that expired, or were of a dead session."] = 0
    sessions_dropped: Annotated[Total, "Sessions that did not read their answers."] = 0
    internal_errors: Annotated[
        Total, "Defects of the server itself: each ended the session that met it, and the log names it by its number."
    ] = 0
    turns: Annotated[
        dict[str, TurnStats],
        "How long its loop was kept: by one frame of a client and the waiting requests that it served (`request`), by "
        "events that were due (`tick`), and by making changes durable before answers are sent (`commit`).",
    ] = {}


class Stats(Answer, frozen=True, kw_only=True):
    """One moment of a deployment."""

    now_s: Annotated[float, "The server's clock."]
    epoch: Annotated[int, "This life of the coordinator."] = 0
    sessions: Annotated[int, "Sessions that are open."] = 0
    tables: Annotated[dict[str, TableStats], "All tables, or the one asked for."]
    channels: Annotated[dict[str, ChannelStats], "Weight channels."] = {}
    bytes: Annotated[BytesStats, "Extents, blocks and pins of all together."] = BytesStats()
    waiting: Annotated[list[Waiting], "Requests that wait at the server: the hundred that have waited longest."] = []
    server: Annotated[ServerStats, "The process that answers."] = ServerStats()
    coordinators: Annotated[
        dict[str, Any], "Of several coordinators: what each said, or an `UnreachableCoordinator`, by its address."
    ] = {}


class AuditAnswer(Answer, frozen=True, kw_only=True):
    """The books of all tables."""

    balanced: Annotated[bool, "Whether every table is."]
    tables: Annotated[dict[str, TableAudit], "By table."]
    dropped_tables: Annotated[dict[str, int], "Sums over tables that exist no more: put, done, dropped."] = {}
