"""What the sync and the async API share."""
