"""Reading columns: their places in memory, and gathering rows."""
