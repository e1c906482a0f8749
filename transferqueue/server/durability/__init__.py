"""The journal, the state directory, and snapshots."""
