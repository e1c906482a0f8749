"""Simulate the production server and client state machines under faults: one thread, one seed, simulated time.

Rules:

1. All decisions are made by production code: the ledger, its record and recovery, the coordinator with its waiting
   requests, the allocator, the codec, and the client's `PendingCalls`. The clock, the network, the disk, the arena's
   bytes and the kernel are simulated.
2. A run is a pure function of its seed: no clock, no thread, no hash order, no second source of chance.
3. After every step the server's accounts must balance. Every reply to a client is compared with the accounts of a job
   (`ClientAccount`), which knows nothing of the ledger.
4. At the end all faults stop, and everything must drain: every wait ends, every row is done or dropped.
"""

from tests.simulator.run import Result, replay_command, simulate

__all__ = ["Result", "replay_command", "simulate"]
