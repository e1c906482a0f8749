"""The state of the ledger as bytes: journal images and snapshots."""
