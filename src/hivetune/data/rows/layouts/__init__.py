"""The layouts in which people keep interactions, each a pure function from one row to its messages."""
