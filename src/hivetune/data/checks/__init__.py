"""The checks of a row: what makes it unfit to learn from, private, or a copy of another row."""
