"""The training worker: the loop (loop.py) and all that it needs. A module with a `main` is the entry of a child."""
