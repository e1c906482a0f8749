"""Queue, table and lease as a program sees them: sync and async fronts."""
