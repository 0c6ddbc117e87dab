"""The checks of a row: reasons not to learn from it, private data in it, and whether it is a copy of another row."""
