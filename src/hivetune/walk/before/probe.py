"""Before step 0: two measured steps of the run on this machine settle its choices."""

import itertools
from collections.abc import Callable

from hivetune.machine.doctor.variables import Variable
from hivetune.process.launch import Launch, launch_child
from hivetune.process.parent import see_off, start_child
from hivetune.process.protocol import Beat, Probe
from hivetune.records import Progress, silent
from hivetune.run.choices import read_resolved
from hivetune.run.folder import OUTCOME, PROBE
from hivetune.run.status import has_begun, hold_run
from hivetune.walk.before.variables import settle_variables
from hivetune.walk.open import Run


def probe_run(
    run: Run, progress: Progress = silent, meanwhile: Callable[[], None] = lambda: None, start: Launch = launch_child
) -> tuple[Variable, ...]:
    """Measure this machine with the run's own shapes and write the choices down, once, before step 0.

    `meanwhile`: done here once nothing is timed any more, while the child compares itself with transformers, whose
    import keeps one core busy for seconds. `start` makes the child's process. Returns the variables that the run's
    workers were given or lost now, for whoever tells the user.

    Raises DoesNotFit with what would fit. A probe that dies leaves the run without measured choices: finding out why
    workers die is the supervisor's business.
    """
    variables = settle_variables(run)
    with hold_run(run.folder):
        if has_begun(run.folder):
            meanwhile()
            return variables
        beats = itertools.count(1)
        left = [meanwhile]

        def on_beat(beat: Beat) -> None:
            progress(next(beats), None)
            if beat is Beat.MEASURED and left:
                left.pop()()

        task = Probe(run.model, run.snapshot.folder, run.folder)
        environment = read_resolved(run.folder)[1].environment
        outcome = see_off(start_child(task, run.folder / PROBE, environment=environment, start=start), on_beat)
        if outcome.error is not None and outcome.error.exit_code != 1:
            (run.folder / PROBE / OUTCOME).unlink()
            outcome.check("the probe")
        if left:  # it died before
            meanwhile()
    return variables
