"""The page that shows a running queue."""
