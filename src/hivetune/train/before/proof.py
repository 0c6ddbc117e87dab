"""Before a run begins: what was proven under another driver, torch or card is proven again, at the run's own shapes."""

from hivetune.machine.doctor.look import Surroundings, look
from hivetune.machine.doctor.prove import prove_look
from hivetune.machine.doctor.proven import proof_as_text
from hivetune.machine.inventory import read_machine
from hivetune.machine.profile import proven_before
from hivetune.records import Progress, silent
from hivetune.run.status import has_begun, hold_run
from hivetune.train.open import Run


def proof_is_due(run: Run) -> bool:
    """Whether this home's proof is of another machine than this one is now, and the run has not begun.

    Who never asked the doctor is not made to wait for it: each run compares its own first step with transformers'.
    """
    return not has_begun(run.folder) and proven_before(read_machine().fingerprint)


def prove_again(run: Run, progress: Progress = silent) -> str:
    """Prove this machine at the run's shapes, about a minute; returns what came out, for people.

    The profile that is written decides what the run may compute in. Raises UsageError as `job_of`.
    """
    with hold_run(run.folder):
        return proof_as_text(prove_look(look(Surroundings(folder=run.folder)), run.config, progress=progress))
