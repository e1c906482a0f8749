"""Carriers: what moves columns between hosts beside the stream (`transferqueue.transport.bulk.carriers`)."""
