"""The collection: readers in threads, each batch durable before it is acknowledged, a clean stop at any time."""

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field

from hivetune.base.database import open_database
from hivetune.data.intake.interactions import Tally, commit_batch
from hivetune.data.intake.sources.delivered import Batches, Reader
from hivetune.data.intake.sources.documents import DocumentReader
from hivetune.data.intake.sources.jsonl import JsonlReader

TICK_S = 0.1
MAX_SHARED_THREADS = 4  # each holds the database open, and a folder may have thousands of documents


@dataclass(slots=True)
class Collected:
    """The readers of a collection, and its counts by reader. They may be read while the threads run, since they only
    grow.
    """

    readers: list[Reader] = field(default_factory=list)
    tallies: dict[str, Tally] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def enter(self, reader: Reader) -> bool:
        """Add a reader, unless there is one of this name."""
        with self.lock:
            is_new = reader.name not in self.tallies
            if is_new:
                self.tallies[reader.name] = Tally()
                self.readers.append(reader)
            return is_new

    def add(self, name: str, tally: Tally) -> None:
        with self.lock:
            self.tallies[name].add(tally)

    def total(self) -> Tally:
        with self.lock:
            total = Tally()
            for tally in self.tallies.values():
                total.add(tally)
            return total


def collect(
    readers: Sequence[Reader],
    *,
    follow: bool,
    stop: threading.Event,
    tick: Callable[[Collected], None] = lambda _collected: None,
) -> Collected:
    """Store everything that `readers` have in hive.db, with `follow` until `stop` is set.

    The calling thread calls `tick` about ten times a second. After `stop` the current batch is still committed and
    acknowledged. The first reader that fails stops all others, and its error is raised: UsageError, MachineNotFit,
    DoesNotFit, Busy, or a bug.
    """
    open_database().close()  # migrates once, before the threads
    collected = Collected()
    for reader in readers:
        collected.enter(reader)
    failures: list[BaseException] = []

    def run(group: Sequence[Reader]) -> None:
        try:
            _drain(group, collected, follow=follow, stop=stop)
        except BaseException as error:  # noqa: BLE001 (raised again by the thread that waits)
            failures.append(error)
            stop.set()

    waiting = [[reader] for reader in readers if not reader.poll_s]
    others = [reader for reader in readers if reader.poll_s]
    shared = [others[number::MAX_SHARED_THREADS] for number in range(min(len(others), MAX_SHARED_THREADS))]
    threads = [threading.Thread(target=run, args=(group,), name=group[0].name) for group in (*waiting, *shared)]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            while thread.is_alive():
                thread.join(timeout=TICK_S)  # short, so that this thread handles signals
                tick(collected)
    except BaseException:
        stop.set()
        raise
    finally:
        for thread in threads:
            thread.join()
    if failures:
        raise failures[0]
    return collected


def _drain(readers: Sequence[Reader], collected: Collected, *, follow: bool, stop: threading.Event) -> None:
    """Store what each of the readers has now, one after another, with `follow` again and again, and then also the
    documents that come into a folder.
    """
    with closing(open_database()) as database, ExitStack() as stack:
        started: list[tuple[Reader, Batches]] = []
        new = list(readers)
        while True:
            started += [(r, stack.enter_context(closing(r.batches(database, follow, stop)))) for r in new]
            new = []
            for reader, batches in started:
                while (batch := next(batches, None)) is not None:
                    collected.add(reader.name, commit_batch(database, batch))
                if not follow:
                    batches.close()
                elif isinstance(reader, JsonlReader):
                    found = [DocumentReader(path, came_later=True) for path in reader.new_documents()]
                    new += filter(collected.enter, found)
            if not follow or stop.is_set():
                return
            stop.wait(min(reader.poll_s for reader, _ in started))
