"""The loops around the ledger and the arena: coordinator, shard, node."""
