"""Chaos: run a real queue of real processes, inject faults by a seeded plan, and account for every row.

1. Nothing here is simulated. The server is ``transferqueue serve --supervise``, each role is a process of its own, and
   faults are signals, limits of the kernel and a TCP proxy. The seed decides the faults and when each is due
   (`fault_plan`); their effect on the machine differs from run to run.
2. The bytes of a row follow from its key (`payload`). Each process that leases a row computes them again and compares.
3. Each process writes an event log (`log`): a line before it tries a change, and a line after the change is
   confirmed. Written lines outlive the process.
4. After the last fault the run ends all faults, seals the tables and waits until they are drained. Then it checks the
   event logs against the server's own audit (`verify`): each task did each confirmed row once, and nothing else.
5. A run removes all its remains: processes, sockets, shared memory, directories.
"""
