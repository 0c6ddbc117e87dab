"""Arguments to one call. The only room that prints or chooses an exit code."""
