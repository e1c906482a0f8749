"""The planner of a job, and the simulated job by which it compares plans: the production ledger in simulated time."""
