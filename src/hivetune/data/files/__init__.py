"""Which kind of file holds the rows, and how each kind becomes numbered lines."""
