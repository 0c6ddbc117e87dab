"""Train: the plan of a run, the supervisor that keeps it going, and the worker that computes it."""
