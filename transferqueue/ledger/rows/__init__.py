"""The rows of a table: their state, the places of their columns, and the indexes over them.

Other rooms import from here only; the modules of this folder know each other, and no table, task or request. A request
goes through `check_columns`, which changes nothing, and then through `append_rows` (new rows), or `reserve_blocks` and
`write_columns` (rows that exist).
"""

from transferqueue.ledger.rows.column_places import BlockSlots, ColumnGroups, Slots
from transferqueue.ledger.rows.commit import (
    CommitFields,
    StagedCommit,
    added_columns,
    append_rows,
    check_columns,
    check_contents,
    check_layout,
    check_no_group_facts,
    check_size,
    check_unset,
    discard,
    reserve_blocks,
    retire,
    unused,
    write_columns,
)
from transferqueue.ledger.rows.continued import (
    Continued,
    Forests,
    Nodes,
    blocks_above,
    blocks_below,
    forests,
    keys_of,
    values_of,
)
from transferqueue.ledger.rows.dropped import LastFailure, SpentRow, SpentRows
from transferqueue.ledger.rows.groups import GroupIndex
from transferqueue.ledger.rows.indexes import FinishedOrdinals, StepIndex, VersionIndex
from transferqueue.ledger.rows.put_dedup import KnownPuts
from transferqueue.ledger.rows.row_pages import DONE, DROPPED, LIVE
from transferqueue.ledger.rows.row_record import EndedRows, RowRecord, life_of
from transferqueue.ledger.rows.row_state import FieldMask, RowStore
from transferqueue.ledger.rows.table_history import TableEvent, TableHistory
