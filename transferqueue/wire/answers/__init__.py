"""What a queue answers about itself, as typed values; each figure is declared here once (`answer`)."""
