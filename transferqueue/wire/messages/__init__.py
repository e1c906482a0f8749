"""Every message between a client and the control plane, as typed values. Pure data: no I/O, no code.

A request is answered by exactly one reply, an error (`Failed`), or, if the request may wait, by one of these later.
Requests carry an id that the client chose, ascending within its session. A request sent again with the same id gets the
same answer and changes nothing twice.

Arrays travel as little-endian bytes: `Rows` are int64 row ids; `I64`, `I32` and `F64` are of their names' types. The
decoder validates types, the ledger meanings. Each list, text and map has a bound that the decoder compares with its
count before it allocates anything. The ledger's own bounds, whose errors name the remedy, are lower.
"""

from __future__ import annotations

from transferqueue.wire.messages.base import *
from transferqueue.wire.messages.envelope import *
from transferqueue.wire.messages.memory import *
from transferqueue.wire.messages.observe import *
from transferqueue.wire.messages.rows import *
from transferqueue.wire.messages.session import *
from transferqueue.wire.messages.shards import *
from transferqueue.wire.messages.snapshots import *
from transferqueue.wire.messages.tables import *
from transferqueue.wire.messages.weights import *
