"""Other stores that can keep the bytes of a shard."""
