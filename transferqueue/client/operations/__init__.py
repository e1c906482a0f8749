"""The operations of a client, as generators that perform no I/O."""
