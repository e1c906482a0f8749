"""verl's side of a trial: its trainer on a CPU over Ray, on the queue that it has and on this one."""
