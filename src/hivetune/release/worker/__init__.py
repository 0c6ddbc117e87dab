"""Tasks that run in a child process: merge, convert and quantize a trained adapter."""
