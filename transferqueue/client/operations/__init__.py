"""What a client does, as generators that perform no I/O."""
