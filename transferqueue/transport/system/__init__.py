"""What the operating system gives: host identity, locks, private files, wake-ups."""
