"""The command `train`: open the run of a config, train it under the supervisor, show the result."""

from typing import Annotated

import typer

from hivetune.cli.arguments import ColumnsOption, ConfigArgument, ModelOption, SetOption, read_settings
from hivetune.cli.output import emit, show
from hivetune.process.forkserver import start_ahead
from hivetune.run.status import shortest_name


def train(
    config: ConfigArgument,
    model: ModelOption = None,
    columns: ColumnsOption = None,
    overrides: SetOption = None,
    chunk_rows: Annotated[int | None, typer.Option(help="Finish all epochs on this many rows before the next.")] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Train in the background.")] = False,
) -> None:
    """Train an adapter. Run the same command again to continue a run that stopped.

    A finished run is not trained again. CONFIG is a YAML file, or a file of rows together with --model.
    """
    chunks = [] if chunk_rows is None else [f"chunk_rows={chunk_rows}"]
    loaded, name = read_settings(config, model, [*(overrides or []), *chunks], columns)
    if not detach:
        start_ahead()
    # While the fork server imports, this process does.
    from hivetune.cli.training import measure_and_train, open_configured, show_training, train_detached

    run = open_configured(loaded, name)
    if detach and not run.is_finished:
        train_detached(run.folder)
        return
    summary = measure_and_train(run)
    show_training(summary)
    show(f"next: hivetune eval {shortest_name(run.folder)}")
    emit(summary)
