"""The bases that the sync and the async API share."""
