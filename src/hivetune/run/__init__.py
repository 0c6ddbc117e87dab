"""A run folder: its files, choices, checkpoints and state, for whoever reads or writes one."""
