"""Real kills: a forked process does the work and dies, or meets an error, at its n-th change of the file system.

CPython tells an audit hook of each of them before it is made (PEP 578), so what is tested has no hook of its own.
"""

import itertools
import os
import signal
import sys
from collections.abc import Callable, Iterator

_CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.truncate", "shutil.rmtree")
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def each_crash(work: Callable[[], object], error: int | None = None, *, lasting: bool = False) -> Iterator[int]:
    """Do `work` in a child that is killed before its first change, then one that is killed before its second, ...,
    and yield the number after each death. The last child does all of it, and its number is yielded too.

    With `error`, the change raises OSError with this number instead; with `lasting` all later ones that need room do,
    too. An OSError is then an allowed end of the work.
    """
    for number in itertools.count():
        pid = os.fork()
        if pid == 0:
            _work(work, number, error, lasting=lasting)
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        assert code in (-signal.SIGKILL, _REACHED, 0), f"change {number}: the child ended with {code}"
        yield number
        if code == 0:
            return


_REACHED, _FAILED = 3, 4


def _work(work: Callable[[], object], number: int, error: int | None, *, lasting: bool) -> None:
    changes = 0

    def before(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal changes
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & _WRITES
        if not writes and event not in _CHANGES:
            return
        changes += 1
        removes = event in ("os.remove", "os.rmdir", "shutil.rmtree")
        if changes == number + 1 or (lasting and changes > number and not removes):
            if error is None:
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(error, os.strerror(error or 0))

    code = _FAILED
    try:
        sys.addaudithook(before)
        work()
        code = _REACHED if changes > number else 0
    except OSError as raised:
        code = _REACHED if raised.errno == error else _FAILED
    finally:
        os._exit(code)
