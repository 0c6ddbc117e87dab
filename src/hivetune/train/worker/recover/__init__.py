"""What recovery asks of throw-away children: which row kills a worker, and what can be saved."""
