"""The entry point, which blocks signals until `main` can handle them, so that Ctrl-C never interrupts an import.

Nothing else is imported here: the other imports take 0.2 s, during which a person may already press Ctrl-C.
"""

import signal

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run() -> None:
    """Run the command `hivetune`. Signals stay blocked until `main` unblocks them."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    from hivetune.cli.main import main

    main()
