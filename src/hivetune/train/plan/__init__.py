"""What fits, how long it takes, and which rows make which step: pure functions, except in run.py, which reads files."""
