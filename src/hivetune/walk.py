"""The Python API: a function for each step from rows to a served model; the commands call the same functions.

Each function takes and returns frozen values, prints nothing, and reports progress to a callback
`progress(done, total)`, whose total is None while it is unknown. Errors are those of `hivetune.errors`; each has a
message, a hint and an exit code. docs/python.md has a complete example.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hivetune import __version__
from hivetune.base.database import open_database
from hivetune.base.disk import MANIFEST, sha256_file
from hivetune.base.journal import read_journal
from hivetune.config import RunConfig, load_config, override_config, parse_config
from hivetune.data.prepare.prepare import check as check_rows
from hivetune.data.prepare.prepare import prepare_data
from hivetune.data.snapshot import Snapshot
from hivetune.errors import MachineNotFit, UsageError
from hivetune.judge.evaluate import evaluate_run, judge_run, stored_verdict
from hivetune.models.prepared import fetch_model
from hivetune.records import Progress, Verdict, silent
from hivetune.release import registry
from hivetune.release.export import DEFAULT_QUANT, Exported, export_run
from hivetune.release.prove import prove_export, unserved_base
from hivetune.run.folder import EVENTS, adapter_hash, require_adapter
from hivetune.run.status import find_run, refuse_older_adapter
from hivetune.serve.chat import most_prompt
from hivetune.serve.route import GREEDY
from hivetune.train.open import Run, load_run
from hivetune.train.plan.run import Planned, plan_run
from hivetune.train.start import open_run, train_run
from hivetune.train.supervise.attempt import Terms

if TYPE_CHECKING:
    from hivetune.serve.run import GatewaySettings

# A config, the path of its YAML file, or its settings as plain values.
Config = RunConfig | Path | str | Mapping[str, Any]


def configure(config: Config, overrides: Iterable[str] = ()) -> RunConfig:
    """Return the config with each `a.b=c` of `overrides` applied. Raises UsageError naming the problem."""
    if isinstance(config, RunConfig):
        return override_config(config, overrides)
    if isinstance(config, Mapping):
        return parse_config(config, "config", overrides)
    return load_config(Path(config), overrides)


# ---- rows


def check(config: Config, *, progress: Progress = silent) -> dict[str, Any]:
    """Return the report on the rows of a config, as `hivetune check --json` prints it.

    It counts every row by its fate, with reasons and places. Bad rows raise no error.
    """
    settings = configure(config)
    model = fetch_model(settings.model, progress, settings.template)
    report = check_rows(
        settings.data, model_folder=model, max_length=settings.max_length, learn=settings.learn, progress=progress
    )
    return report.document


def prepare(config: Config, *, progress: Progress = silent) -> Snapshot:
    """Return the snapshot of the rows: tokens and masks on disk. Equal rows and settings give the same snapshot.

    Raises DataRefused if no row is usable or too many are rejected.
    """
    settings = configure(config)
    return prepare_data(settings, fetch_model(settings.model, progress, settings.template), progress)


# ---- training


def plan(config: Config, *, card: str | None = None) -> Planned:
    """Return the predicted memory, time and disk of a run, here or on another card. Loads no model.

    Raises DoesNotFit with advice if the run cannot fit.
    """
    planned = plan_run(configure(config), card=card)
    if planned.refusal is not None:  # a program may not look at it, and would train
        raise planned.refusal
    return planned


def train(config: Config, name: str = "python", *, progress: Progress = silent) -> Run:
    """Train an adapter and return its run. A run of the same config and rows is continued; a finished one is returned.

    `run.folder` has the adapter, and `run.record["result"]` the figures that `hivetune train --json` prints.
    `run.warning` is the reason why llama.cpp can't serve the base, so that the run is judged by its loss alone; empty
    if it can. Raises RecoveryExhausted if faults could not be overcome; the folder then has the best adapter so far.
    """
    run, warning = open_run(configure(config), name, progress), ""
    if not run.is_finished:
        warning = unserved_base(run, progress)
        total = len(run.plan.steps)
        train_run(run, Terms(lambda done: progress(done, total)))
    return replace(load_run(run.folder), warning=warning)


def open_trained(run: str | Path) -> Run:
    """Return a run by name, folder or 'last'. Raises UsageError if it is missing or damaged."""
    return load_run(find_run(str(run)))


# ---- verdict


def evaluate(run: Run, *, progress: Progress = silent) -> dict[str, Any]:
    """Measure base and tuned model on held-out rows; write eval.json and return it."""
    return evaluate_run(run, progress)


def gate(run: Run) -> Verdict:
    """Return the verdict on the evaluation of a run by the thresholds of its config; write it into eval.json.

    `verdict.verdict` is deploy, iterate, abort or not-enough-evidence, `verdict.reasons` says why. Raises UsageError if
    the run has no evaluation.
    """
    return judge_run(run)


# ---- release


def export(
    run: Run, to: str = "gguf", *, quant: str = DEFAULT_QUANT, prove: bool = True, progress: Progress = silent
) -> Exported:
    """Write a run as adapter, merged, gguf or gguf-adapter; return the export, whose `path` is the file or folder.

    With `prove` the exported file is checked to compute the trained model. Raises HivetuneError if it does not.
    """
    exported = export_run(run.folder, to, quant=quant, progress=progress)
    if prove:
        prove_export(run.folder, exported, progress)
    return exported


def register(run: Run, name: str) -> str:
    """Add a run to the registry as the next version of `name`; return its label, such as `helpdesk@3`."""
    return register_run(run.folder, name)[0].label


def register_run(folder: Path, name: str, domain: Mapping[str, str] | None = None) -> tuple[registry.Release, bool]:
    """Register the adapter of a run as the next version of `name`. Return the release, and whether it is new. `domain`:
    `of`, `by` and `value`, if the adapter is for one agent or category of another name.

    Raises UsageError for a run without an adapter or an unusable name, DoesNotFit, Busy, HivetuneError for damage.
    """
    run = load_run(folder)
    require_adapter(folder)
    refuse_older_adapter(folder)
    # The settings that the release is judged with, which the gateway adds to a request without them. Evaluations are
    # greedy. `system`: the prompt of most rows, which the chat page sends.
    prompt = most_prompt(run.snapshot)
    generation = {**GREEDY, **({} if prompt is None else {"system": prompt})}
    proof = {**_prove(run), "generation": generation, **({} if domain is None else {"domain": dict(domain)})}
    with closing(open_database()) as database:
        return registry.register(database, run.folder, name, _manifest(run, proof), by=registry.who())


def _prove(run: Run) -> dict[str, Any]:
    """Return the proof of the adapter's GGUF file. Its `unserved` is the reason why this model can't be served on this
    machine.

    Raises HivetuneError for a file that does not compute the trained model.
    """
    try:
        return {"export": prove_export(run.folder, export_run(run.folder, "gguf-adapter"))}
    except (UsageError, MachineNotFit) as error:
        return {"unserved": error.message}


def _manifest(run: Run, proof: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of the release's manifest. It needs neither the run folder nor the snapshot afterwards."""
    record, manifest = run.record, run.snapshot.manifest
    verdict = stored_verdict(run)
    started = [entry for entry in read_journal(run.folder / EVENTS) if entry["event"] == "supervisor_started"]
    return {
        "model": run.config.model,
        "model_sha256": sha256_file(run.model / MANIFEST),
        "adapter_sha256": adapter_hash(run.folder),
        "snapshot": run.snapshot.hash,
        "verdict": None if verdict is None else verdict["verdict"],
        "judgement": verdict,
        "proof": dict(proof),
        "data": {
            "snapshot": run.snapshot.hash,
            "path": str(run.snapshot.folder),
            "rows": manifest["accounting"],
            **{part: record["result"]["rows"][part] for part in ("trained", "held_out", "not_reached")},
        },
        "settings": record["identity"]["settings"],
        "machine": {key: started[-1].get(key) for key in ("fingerprint", "versions")} if started else None,
        "hivetune": __version__,
    }


def serve(settings: "GatewaySettings | None" = None, on_ready: Callable[[str], None] = lambda url: None) -> None:
    """Serve the champions over the OpenAI API until the process is stopped; `on_ready` gets the address."""
    from hivetune.serve.run import GatewaySettings, run_gateway  # needs the extra `serve`

    run_gateway(settings or GatewaySettings(), on_ready)
