"""Run in a child process: the loss of base and tuned model."""
