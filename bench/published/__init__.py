"""Published figures of AsyncFlow and StreamRL, replayed through the queue or simulated around its ledger
(docs/understand/published.md)."""
