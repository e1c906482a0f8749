"""Files with the rows of a table that ended (`Recorded`): their names, and their reader."""
