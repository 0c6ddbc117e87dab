"""`hivetune learn`: both stages of training, and which of them ships."""

from pathlib import Path
from typing import Any

from hivetune.cli.arguments import ColumnsOption, ConfigArgument, ModelOption, SetOption, read_settings
from hivetune.cli.data import learned_words
from hivetune.cli.judge import show_metrics
from hivetune.cli.model import model_folder
from hivetune.cli.output import emit, number, progress, say, show, table
from hivetune.cli.training import measure_and_train
from hivetune.data.intake.files import find_sources
from hivetune.learn.station import learn as learn_in_stages
from hivetune.process.launch import Ahead
from hivetune.run.find import shortest_name
from hivetune.train.open import Run


def learn(
    config: ConfigArgument,
    model: ModelOption = None,
    columns: ColumnsOption = None,
    overrides: SetOption = None,
) -> None:
    """Train, then learn from pairs and failures; what ships is what answers better. Finished stages are found again."""
    loaded, name = read_settings(config, model, overrides or [], columns)
    find_sources(loaded.data.path)
    model_folder(loaded.model)

    def train(run: Run) -> dict[str, Any]:
        with Ahead() as ahead:
            return measure_and_train(run, ahead)

    with progress("comparing the stages", "items") as comparing:
        document = learn_in_stages(loaded, name, train=train, say=say, comparing=comparing)
    show_stages(document)
    emit(document)


def show_stages(document: dict[str, Any]) -> None:
    """What was learned from, what each stage came to, and which one ships."""
    show(learned_words(document["learned_from"]) or "to learn from beside good rows: nothing")
    names = (("stage1", "stage 1"), ("stage2", "stage 2"), ("longer", "stage 1, longer"))
    rows = [
        (label, stage["steps"], stage["adapter_step"], number(stage["loss_first"]), number(stage["loss_last"]))
        for key, label in names
        if (stage := document[key]) is not None
    ]
    columns = ("run", "steps", "adapter of step", "loss first", "loss last")
    table("", columns, rows, numeric=columns[1:])
    for rival, verdict in document["against"].items():
        show(f"stage 2 beside {rival}: {verdict['verdict']}")
        show_metrics(verdict["metrics"], (rival, "stage 2"))
    for reason in document["reasons"]:
        show(f"  {reason}")
    show(f"ships: {document['ships']}", style="bold green")
    show(f"next: hivetune eval {shortest_name(Path(document['run']))}")
