"""How long work about experts tells how far it is, and hears that it must end."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from hivetune.records import Progress, silent
from hivetune.train.supervise.attempt import Terms


@dataclass(frozen=True)
class Attended:
    """`bar`: a progress bar by its label; `terms`: of every training; `between`: called between two pieces of work, of
    minutes each, and raises what shall end the whole. What is finished then is kept. `side_by_side`: several trainings
    may go on at once, each in a process of its own, none of which can stand still as `terms` may ask."""

    bar: Callable[[str], Progress] = lambda label: silent
    terms: Terms = Terms()  # noqa: RUF009 (frozen)
    between: Callable[[], None] = lambda: None
    side_by_side: bool = True

    def training(self, label: str, steps: int) -> Terms:
        """Terms of one training, which also moves its bar."""
        report = self.bar(label)

        def on_step(done: int) -> None:
            self.terms.on_step(done)
            report(done, steps)

        return replace(self.terms, on_step=on_step)


ALONE = Attended()  # nobody watches
