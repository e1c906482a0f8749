"""Memory of this server and of remote shards, and the transfers of its bytes."""
