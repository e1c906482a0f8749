"""The ledger's reports for people: statistics and answers to `Observe`."""
