"""The files of rows: their kinds, and a reader for each kind that yields numbered rows."""
