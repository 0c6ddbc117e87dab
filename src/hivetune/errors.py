"""All errors for users, with their exit codes.

    HivetuneError 1
    ├── UsageError 2           the command line, the config file or a name is wrong
    │   └── NotThere 2         what a request over HTTP names does not exist
    ├── DataRefused 3          too few usable rows
    ├── MachineNotFit 4        a missing package, driver or server
    ├── DoesNotFit 5           memory, time or disk
    ├── NotDeployed 6          the gate did not say deploy
    ├── RecoveryExhausted 7    all recovery steps were tried; a loadable adapter remains if a step was committed
    ├── Busy 75                another process holds the folder (EX_TEMPFAIL)
    └── Stopped 128 + signal   stopped by a signal after a clean checkpoint

`message` says what happened and where (`file:line`), `hint` what to do next.
Bugs are plain Python exceptions and exit with 1.
"""

import signal


class HivetuneError(Exception):
    """The base of all errors for users."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str = ""):
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message


class UsageError(HivetuneError):
    exit_code = 2


class NotThere(UsageError):
    """Something that a request names does not exist, or no longer; over HTTP this is status 404."""


class DataRefused(HivetuneError):
    exit_code = 3


class MachineNotFit(HivetuneError):
    exit_code = 4


class DoesNotFit(HivetuneError):
    exit_code = 5


class NotDeployed(HivetuneError):
    exit_code = 6  # so that a script can write: eval && export


class RecoveryExhausted(HivetuneError):
    exit_code = 7


class Busy(HivetuneError):
    exit_code = 75  # EX_TEMPFAIL of sysexits.h: schedulers try it again


class Stopped(HivetuneError):
    """A signal ended the work after everything was saved. The exit code is 128 + the signal's number.

    `signal_number` is None if the caller asked for the end without a signal, such as a cycle at the end of its window.
    """

    def __init__(self, message: str, *, signal_number: int | None = signal.SIGINT, hint: str = ""):
        super().__init__(message, hint=hint)
        self.signal_number = signal_number
        self.exit_code = 128 + (signal_number or signal.SIGTERM)  # as shells report it
