"""Collecting: one thread per reader, each batch durable before it is acknowledged, a clean stop at any moment."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hivetune.data.interactions import Tally, commit
from hivetune.data.sources.rows import Reader
from hivetune.store import open_database


@dataclass(slots=True)
class Collected:
    """What a collection brought so far, by reader name. Read it while the threads run: counts only grow."""

    tallies: dict[str, Tally] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, name: str, tally: Tally) -> int:
        """Returns the rows of all readers together."""
        with self.lock:
            self.tallies.setdefault(name, Tally()).add(tally)
            return sum(each.delivered for each in self.tallies.values())


def collect(
    readers: Sequence[Reader],
    *,
    follow: bool,
    stop: threading.Event,
    path: Path | None = None,
    progress: Callable[[int, int | None], None] = lambda _done, _total: None,
) -> Collected:
    """Take everything that `readers` have into the store at `path` (None: hive.db); with `follow`, until `stop` is set.

    `stop` ends it after the batch at hand is committed and acknowledged. The first reader that fails stops all others
    in the same way and its error is raised: UsageError, MachineNotFit, DoesNotFit, Busy, or a bug.
    """
    open_database(path).close()  # migrates once, before the threads
    collected = Collected({reader.name: Tally() for reader in readers})
    failures: list[BaseException] = []

    def run(reader: Reader) -> None:
        try:
            _drain(reader, collected, follow=follow, stop=stop, path=path, progress=progress)
        except BaseException as error:  # noqa: BLE001 (raised again by the thread that waits)
            failures.append(error)
            stop.set()

    threads = [threading.Thread(target=run, args=(reader,), name=reader.name) for reader in readers]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            while thread.is_alive():
                thread.join(timeout=0.1)  # short, so that this thread hears signals
    except BaseException:
        stop.set()
        raise
    finally:
        for thread in threads:
            thread.join()
    if failures:
        raise failures[0]
    return collected


def _drain(
    reader: Reader,
    collected: Collected,
    *,
    follow: bool,
    stop: threading.Event,
    path: Path | None,
    progress: Callable[[int, int | None], None],
) -> None:
    database = open_database(path)
    try:
        reader.open(database, follow, stop)
        while not stop.is_set():
            batch = reader.read()
            if batch:
                tally = commit(database, batch)
                reader.confirm()
                progress(collected.add(reader.name, tally), None)
            elif follow:
                stop.wait(reader.poll_s)
            else:
                return
    finally:
        reader.close()
        database.close()
