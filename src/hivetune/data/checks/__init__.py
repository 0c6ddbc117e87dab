"""What makes a row unfit to learn from, private, or a copy of another."""
