"""`hivetune verify-resume`: the proof, on this machine and with this config, that a killed run loses nothing."""

import typer

from hivetune.base.disk import home, scratch_folder
from hivetune.cli.arguments import ColumnsOption, ConfigArgument, ModelOption, SetOption, read_settings
from hivetune.cli.model import model_folder
from hivetune.cli.output import AFTER_ROWS, duration, emit, progress, say, show, table
from hivetune.data.prepare.prepare import prepare_data
from hivetune.train.supervise.verify import verify_resume as verify


def verify_resume(
    config: ConfigArgument,
    model: ModelOption = None,
    columns: ColumnsOption = None,
    overrides: SetOption = None,
) -> None:
    """Train a few steps twice, once killed by SIGKILL and resumed, and compare weights and optimizer bit for bit."""
    loaded, _ = read_settings(config, model, overrides, columns)
    folder_of_model = model_folder(loaded.model)
    with progress("preparing data", "rows", AFTER_ROWS) as report:
        snapshot = prepare_data(loaded, folder_of_model, report)
    # Not among the temporary files: two runs with their checkpoints may not fit there.
    with scratch_folder(home() / "verify") as folder, progress("training", "steps") as report:
        found = verify(loaded, folder_of_model, snapshot, folder, report)
    table(
        "",
        ("file", "equal", "largest difference"),
        [
            (each.file, "bit for bit" if each.identical else "no", "" if each.difference is None else each.difference)
            for each in found.files
        ],
    )
    say(
        f"{found.steps} steps on {found.device}, killed {found.kills} times, "
        f"gone on from step {', '.join(map(str, found.resumed_from))}; {duration(found.seconds)}"
    )
    document = {
        "identical": found.identical,
        "passed": found.passed,
        "steps": found.steps,
        "kills": found.kills,
        "resumed_from": list(found.resumed_from),
        "device": found.device,
        "files": [
            {"file": each.file, "identical": each.identical, "difference": each.difference} for each in found.files
        ],
        "seconds": found.seconds,
    }
    emit(document)
    if not found.passed:
        say("hivetune: the killed run came to other weights than the undisturbed one")
        say("hint: run it again; if they differ again, report it with the output of --json")
        raise typer.Exit(1)
    words = "equal bit for bit" if found.identical else "equal within the rounding of this card"
    show(f"verified: the killed and the undisturbed run are {words}")
