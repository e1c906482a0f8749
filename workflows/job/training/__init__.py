"""The trainer of a job: gathers steps from the queue, learns, publishes weights, writes checkpoints."""
