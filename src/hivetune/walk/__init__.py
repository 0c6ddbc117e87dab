"""The stations of the walk, in the order in which an interaction passes them."""
