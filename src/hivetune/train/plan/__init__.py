"""What fits, how long it takes, and which rows make which step: pure functions, but for run.py and propose.py."""
