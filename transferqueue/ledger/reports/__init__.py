"""What people ask of the ledger: statistics and answers to `Observe`."""
