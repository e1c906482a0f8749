"""Reading columns: where they lie, and how rows are gathered."""
