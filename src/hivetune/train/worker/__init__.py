"""The training worker: the loop (loop.py) and its parts. A module with a `main` can be run as a child process."""
