"""`python -m hivetune`."""

from hivetune.cli.start import run

run()
