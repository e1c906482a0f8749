"""The coordinator process: sessions, shards, durability, and the loop around the ledger."""
