"""What fits, how long it takes, and which rows make which step. Pure functions."""
