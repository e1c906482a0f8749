"""One thread, one seed: the production server and client state machines under faults, in simulated time.

The law:

1. Everything that decides is production code: ledger, recorded ledger and its recovery, node, parking, allocator,
   codec, and the client's `Calls`. Simulated are the clock, the network, the disk, the arena's bytes and the kernel.
2. A run is a pure function of its seed: no clock, no thread, no hash order, no second source of chance.
3. After every step the server's books must balance; every outcome that a client sees is held against
   books of the job's own, which know nothing of the ledger.
4. Then all faults end (*heal*), and everything must drain: every wait ends, every row has its fate.
"""

from transferqueue.testing.simulator.run import Result, replay_command, simulate

__all__ = ["Result", "replay_command", "simulate"]
