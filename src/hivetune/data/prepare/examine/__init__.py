"""One row after the other: everything that is found out about a row without looking at any other."""
