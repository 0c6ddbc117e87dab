"""`python -m hivetune`."""

from hivetune.cli.main import main

main()
