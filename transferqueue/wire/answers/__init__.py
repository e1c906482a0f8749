"""The reports of a queue about itself, as typed values; each figure is declared here once (`answer`)."""
