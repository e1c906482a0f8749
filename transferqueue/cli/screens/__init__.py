"""The screens that commands print to a terminal."""
