"""Operating system services: host identity, locks, private files, wake-ups."""
