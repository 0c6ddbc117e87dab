"""The plan: what fits into memory, how long it takes, and the rows of each step: pure functions, except in run.py,
which reads files."""
