"""Cold blocks on a disk: the file and its thread, and the rules by which blocks go there and come back."""
