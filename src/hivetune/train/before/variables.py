"""Before the first measurement: the variables that a run's workers get, and those that are taken from them."""

from dataclasses import replace

from hivetune.machine.doctor.look import Surroundings, look
from hivetune.machine.doctor.variables import Variable, advised_variables, proven_environment
from hivetune.machine.profile import read_profile
from hivetune.run.choices import read_resolved, write_resolved
from hivetune.run.status import has_begun, hold_run
from hivetune.train.open import Run


def settle_variables(run: Run, where: Surroundings | None = None) -> tuple[Variable, ...]:
    """Choose them once, write them beside the run's other choices, and return those that were chosen now.

    What the user has set stays, unless it is known to break or falsify a run on this card.
    """
    with hold_run(run.folder):
        config, choices = read_resolved(run.folder)
        if has_begun(run.folder) or choices.environment is not None or config.device == "cpu":
            return ()
        seen = look(where or Surroundings(folder=run.folder, measure=False))
        proven = proven_environment(read_profile(seen.machine.fingerprint), config.device, config.dtype)
        advised = advised_variables(seen, proven, keep_set=True)
        if advised:
            settled = replace(choices, environment={one.name: one.value for one in advised})
            write_resolved(run.folder, config, settled)
        return advised
