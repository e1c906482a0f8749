"""The control plane as a pure state machine: requests in, replies and effects out."""
