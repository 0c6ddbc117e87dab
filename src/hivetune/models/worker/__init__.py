"""Tasks that run in a child process: prepare, check and convert models."""
