"""One module for each stack: the table of its keys, and what runs its trainer on this queue."""
