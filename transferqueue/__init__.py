"""TransferQueue."""
