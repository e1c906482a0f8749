"""Commands that start servers and shards, and that work on what a server holds: keys, snapshots, weights between
servers."""
