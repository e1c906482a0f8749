"""The shard's part: the arena as its clients reach it, and the clients' memory as the shard reaches that."""
