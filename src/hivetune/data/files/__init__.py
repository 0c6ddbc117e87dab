"""The files that hold rows: their kinds, and how each kind is read as numbered rows."""
