"""The processes of a flow: their start, their signals, and their ends."""
