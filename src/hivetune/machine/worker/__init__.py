"""Run in a child process: the self-test of a device."""
