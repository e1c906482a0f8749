"""One connection to a server: calls, deadlines, resending, and renewal of leases."""
