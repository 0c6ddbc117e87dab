"""Before step 0: environment variables and two measured steps settle a run's choices."""

import itertools
from collections.abc import Callable
from dataclasses import replace

from hivetune.machine.doctor.findings import Variable, advised_variables
from hivetune.machine.doctor.look import Surroundings, look
from hivetune.machine.inventory import read_machine
from hivetune.machine.profile import read_profile
from hivetune.process.parent import see_off, start_child
from hivetune.process.protocol import Beat, Probe
from hivetune.records import Progress, silent
from hivetune.run.folder import OUTCOME, PROBE, read_resolved, write_resolved
from hivetune.run.status import has_begun, hold_run
from hivetune.train.open import Run


def settle_variables(run: Run, where: Surroundings | None = None) -> tuple[Variable, ...]:
    """Choose the environment variables of a run's workers once. Return the newly chosen ones.

    They are written beside the run's other choices. What the user has set stays, unless it is known to break or falsify
    a run on this card.
    """
    with hold_run(run.folder):
        config, choices = read_resolved(run.folder)
        if has_begun(run.folder) or choices.environment is not None or config.device == "cpu":
            return ()
        advised = advised_variables(look(where or Surroundings(folder=run.folder)), keep_set=True)
        if advised:
            settled = replace(choices, environment={variable.name: variable.value for variable in advised})
            write_resolved(run.folder, config, settled)
        return advised


def probe_run(
    run: Run, progress: Progress = silent, meanwhile: Callable[[], None] = lambda: None
) -> tuple[Variable, ...]:
    """Measure this machine with the run's own shapes and write the choices down, once, before step 0.

    `meanwhile` is called here beside the child, where it disturbs nothing that is timed. Returns the variables that the
    run's workers were given or lost now, for a message to the user.

    Raises DoesNotFit with what would fit. A probe that dies leaves the run without measured choices: the supervisor
    finds out why workers die.
    """
    variables = settle_variables(run)
    with hold_run(run.folder):
        if has_begun(run.folder):
            meanwhile()
            return variables
        beats = itertools.count(1)
        pending = [meanwhile]

        def do_once() -> None:
            if pending:
                pending.pop()()

        def on_beat(beat: Beat) -> None:
            progress(next(beats), None)
            if beat is Beat.MEASURED:
                do_once()

        # On a machine whose rates are known the child loads first, and may have nothing to measure. On another it times
        # products at once, and leaves a core idle when it imports transformers to compare itself with.
        at_once = do_once if read_profile(read_machine().fingerprint).rates else lambda: None
        task = Probe(run.model, run.snapshot.folder, run.folder)
        environment = read_resolved(run.folder)[1].environment
        child = start_child(task, run.folder / PROBE, environment=environment)
        outcome = see_off(child, on_beat, at_once)
        if outcome.error is not None and outcome.error.exit_code != 1:
            (run.folder / PROBE / OUTCOME).unlink()
            outcome.check("the probe")
        do_once()  # the child ended before it was done
    return variables
