"""Chaos: a real queue of real processes, killed, frozen, starved and cut apart by one seed, and an account of every row.

The law:

1. Nothing here is simulated. The server is ``transferqueue serve --supervise``, each role is a process of its own, faults
   are signals, limits of the kernel and a TCP proxy. The seed decides the faults and when each is due (`plan`); what
   the machine makes of them differs from run to run.
2. Every byte of a row follows from its key (`payload`). Whoever leases a row computes them again.
3. Each process keeps a diary (`diary`): a line before it tries to change something, a line once it was told that it is
   changed. A line that was written outlives the process.
4. After the faults everything heals, the tables are sealed and must drain. Then the diaries and the server's own audit
   are judged together (`judge`): what was said to be there was done once by each task, and nothing else was.
5. Whatever a run made, it removes: processes, sockets, shared memory, directories.
"""
