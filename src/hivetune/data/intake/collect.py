"""The collection: one loop over all sources, which stores each batch durably before it requests the next."""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field

from hivetune.base.database import open_database
from hivetune.data.intake.interactions import Tally, commit_batch
from hivetune.data.intake.logs import FileReader
from hivetune.data.intake.reader import Reader
from hivetune.data.intake.streams import SCHEMES, RedisReader
from hivetune.data.intake.tables import SqliteReader
from hivetune.errors import UsageError

# The pause where no source had anything new; so long a new row waits at most.
POLL_S = 0.2


@dataclass(slots=True)
class Collected:
    """The readers of a collection, and their counts by the reader's name."""

    readers: Sequence[Reader]
    tallies: dict[str, Tally] = field(default_factory=dict)

    def total(self) -> Tally:
        total = Tally()
        for tally in self.tallies.values():
            total.add(tally)
        return total


def parse_sources(sources: Sequence[str]) -> list[Reader]:
    """Return the readers of all sources. Raise UsageError, MachineNotFit."""
    readers: list[Reader] = []
    for source in sources:
        scheme, mark, _ = source.partition("://")
        if source.startswith("sqlite:"):
            readers.append(SqliteReader(source))
        elif source.startswith(SCHEMES):
            readers.append(RedisReader(source))
        elif mark and "/" not in scheme:
            known = f"known: {' '.join(SCHEMES)} sqlite:PATH"
            raise UsageError(f"sources of the kind {scheme}:// are unknown", hint=known)
        else:
            readers.append(FileReader(source))
    # Two readers of one source would move its position by turns.
    for name, count in Counter(reader.name for reader in readers).items():
        if count > 1:
            raise UsageError(f"{name} is named twice", hint="name each source once")
    return readers


def collect(
    readers: Sequence[Reader],
    *,
    follow: bool,
    stop: threading.Event,
    tick: Callable[[Collected], None] = lambda _collected: None,
) -> Collected:
    """Store in hive.db all rows of `readers`: those available now, or with `follow` also later ones until `stop` is
    set.

    `tick` is called after each batch and each round. After `stop` the current batch is still committed. Raise the
    errors of a reader: UsageError, DataRefused, MachineNotFit, DoesNotFit, Busy.
    """
    # One thread reads and writes, so that each batch is durable before its source moves on. Threads would wait for the
    # database's one writer anyhow.
    collected = Collected(readers, {reader.name: Tally() for reader in readers})
    with closing(open_database()) as database, ExitStack() as stack:
        active = [(reader, stack.enter_context(closing(reader.batches(database, follow)))) for reader in readers]
        while active and not stop.is_set():
            is_idle = True
            for reader, batches in list(active):
                while not stop.is_set() and (batch := next(batches, None)) is not None:
                    collected.tallies[reader.name].add(commit_batch(database, batch))
                    is_idle = False
                    tick(collected)
                if not follow and not reader.retrying:
                    active.remove((reader, batches))
            tick(collected)
            if is_idle and active:
                stop.wait(POLL_S)
    return collected
