"""Two steps of a stack's own job and of the job that adopt wrote, on the same rows, compared figure by figure."""
