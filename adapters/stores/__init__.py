"""Other stores that can keep a shard's bytes (`transferqueue.cluster.stores`)."""
