"""The loop of one stage: lease or reserve rows, call the function, and ack, put or give back."""
