"""Every message between a client and the control plane, as typed values. Pure data: no I/O, no code.

A request is answered by exactly one reply, an error (`Failed`), or, if the request may wait, by one of
these later. Requests carry an id that the client chose, ascending within its session; a request sent
again with the same id gets the same answer and changes nothing twice.

Arrays travel as little-endian bytes: `Rows` are int64 row ids, `I64`/`I32`/`F64` what they say.
Everything here is validated for type by the decoder and for meaning by the ledger. Each list, text and map has a bound
that the decoder compares with its count before it makes anything; the ledger's own bounds, which say what to do, are
lower.
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
