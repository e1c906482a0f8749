"""Other stores for the bytes of a shard."""
