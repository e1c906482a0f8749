"""Published figures of AsyncFlow and StreamRL, played again through the queue or simulated around its ledger; docs/SIMULATION.md reports them."""
