"""The settings of a job: structs, the file that they are read from, and the rules that they must satisfy. No torch
here."""
