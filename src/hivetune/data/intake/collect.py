"""The collection: one loop over all sources, each batch durable before the next one is asked for."""

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field

from hivetune.base.database import open_database
from hivetune.data.intake.interactions import Tally, commit_batch
from hivetune.data.intake.sources.delivered import Batches, Reader

POLL_S = 0.2  # between two looks where there was nothing new


@dataclass(slots=True)
class Collected:
    """The readers of a collection, and its counts by the name of the reader."""

    readers: list[Reader] = field(default_factory=list)
    tallies: dict[str, Tally] = field(default_factory=dict)

    def total(self) -> Tally:
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

    One thread writes, so that the store has one writer a collection. `tick` is called after each batch and each round.
    After `stop` the current batch is still committed. Raise what a reader raises: UsageError, MachineNotFit,
    DoesNotFit, Busy.
    """
    collected = Collected()
    with closing(open_database()) as database, ExitStack() as stack:
        new, known = list(readers), set()
        active: list[tuple[Reader, Batches]] = []
        while not stop.is_set():
            for reader in new:
                if (type(reader), reader.name) not in known:  # two folders may have the same file
                    known.add((type(reader), reader.name))
                    collected.readers.append(reader)
                    collected.tallies.setdefault(reader.name, Tally())
                    active.append((reader, stack.enter_context(closing(reader.batches(database, follow, stop)))))
            new, is_idle = [], True
            for reader, batches in list(active):
                # One source after the other, since a document that is being read holds a folder and a file.
                while (batch := next(batches, None)) is not None:
                    collected.tallies[reader.name].add(commit_batch(database, batch))
                    is_idle = False
                    tick(collected)
                    if stop.is_set():
                        break
                new += reader.found()
                if batch is None and not follow and not reader.retrying:
                    batches.close()
                    active.remove((reader, batches))
            tick(collected)
            if not active and not new:
                break
            if is_idle and not new:
                stop.wait(POLL_S)
    return collected
