"""Hands a whole message of the bulk protocol to its receiver, as a stream does that has all of it."""

from transferqueue.transport.bulk import protocol


def deliver(head, pieces, receiver):
    """Pass a message to its receiver; `Corruption` if a checksum does not match: then nothing was passed."""
    protocol.check_content(head, protocol.digest(pieces))
    size, nbytes = protocol.lengths(head)
    assert (size, nbytes) == (len(head), sum(memoryview(piece).nbytes for piece in pieces))
    receiver.expect(head, nbytes)
    for piece in pieces:
        left = memoryview(piece).cast("B")
        while len(left):
            left = left[receiver.fill(protocol.reader_of(left)) :]
