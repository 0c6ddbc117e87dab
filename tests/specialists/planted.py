"""Planted domains on a tiny model, and the stations of experts on them; children's tasks run in this process.

What children do is done by the same functions (engine MODULE.main); only the processes are left out, which start for
seconds what here takes tenths.
"""

import importlib
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from serve.hive import MODEL, make_home

from hivetune.base.database import open_database
from hivetune.base.disk import MANIFEST, sha256_file, write_manifest
from hivetune.base.journal import Journal, read_journal
from hivetune.config import RunConfig, parse_config
from hivetune.machine.inventory import read_machine
from hivetune.process.child import Heartbeat
from hivetune.process.protocol import ENTRIES, Outcome, Train
from hivetune.records import Verdict
from hivetune.release.registry import Release, promote, register
from hivetune.run.folder import EVENTS, adapter_hash
from hivetune.specialists import routes, runs, station, survey
from hivetune.train.open import Run, load_run, update_record
from hivetune.train.start import account, open_run
from hivetune.train.supervise.attempt import Terms

SHARED = "team"
THINGS = ("red", "blue", "green", "black", "white", "small", "large", "quick", "slow", "old", "new", "warm")
STYLES = {"brief": "yes", "formal": "no", "list": "maybe"}
# Words that tell a domain, one of them anywhere in a question: a line through words sees them at once, the tiny model
# does not learn them in the few steps of its shared adapter.
CUES = {
    "code": "code compile debug function loop patch branch merge variable class module import script syntax parser "
    "lint build deploy refactor commit",
    "test": "test assert verify expect fixture mock coverage suite regression failure check bug report case scenario "
    "validate inspect pass skip flaky",
    "odd": "strange weird odd",
    "": "thing",
}


def row(number: int, *, agent: str, style: str, cue: str = "", seed: int = 0) -> Any:
    """A question of its own session, with the answer of a style; one of its words is of CUES."""
    said = random.Random(f"{seed} {agent} {number}")
    words = [said.choice(THINGS) for _ in range(4)]
    words.insert(said.randrange(5), said.choice(CUES[cue].split()))
    return {
        "messages": [
            {"role": "user", "content": f"what of {' '.join(words)}?"},
            {"role": "assistant", "content": STYLES[style]},
        ],
        "agent": agent,
        "session_id": f"s{seed}-{agent}-{number}",
    }


def domain(agent: str, style: str, count: int, *, cue: str = "", seed: int = 0) -> list[Any]:
    return [row(number, agent=agent, style=style, cue=cue, seed=seed) for number in range(count)]


def shuffled_agents(rows: Sequence[Mapping[str, Any]], seed: int) -> list[Any]:
    """The same rows under each other's agents."""
    agents = [one["agent"] for one in rows]
    random.Random(seed).shuffle(agents)
    return [{**one, "agent": agent} for one, agent in zip(rows, agents, strict=True)]


def config_of(folder: Path, rows: Sequence[Any], *, seed: int = 0, **settings: Any) -> RunConfig:
    """Rows in a file and the settings of a short run on the tiny model; the model lies in `$HIVETUNE_HOME`."""
    make_home()
    return parse_config({**settings_of(folder, rows), "seed": seed, **settings})


def settings_of(folder: Path, rows: Sequence[Any]) -> dict[str, Any]:
    """Write the rows to a file; return the settings of a short run on them."""
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")
    return {
        "model": MODEL,
        "data": {"path": str(path), "near_duplicates": 0, "validation": 0.25, "test": 0.25},
        "lora": {"r": 4},
        "max_length": 128,
        "batch_size": 16,
        "epochs": 2,
        "learning_rate": 0.01,
        "dtype": "float32",
        "device": "cpu",
        "experts": {"shared": SHARED},
    }


def share(config: RunConfig, folder: Path) -> Release:
    """The shared adapter: trained on all rows, registered and promoted."""
    run = open_run(config.model_copy(update={"output": str(folder)}), "shared")
    train_here(run)
    return keep(run, SHARED)


def keep(run: Run, name: str) -> Release:
    """A finished run as the champion of a name, as `hivetune register` and `promote` do it without llama.cpp."""
    release = registered(run, name)
    with closing(open_database()) as database:
        return promote(database, release.label, by="test", reason="test")


def registered(run: Run, name: str) -> Release:
    about = {
        "model": run.config.model,
        "model_sha256": sha256_file(run.model / MANIFEST),
        "adapter_sha256": adapter_hash(run.folder),
        "snapshot": run.snapshot.hash,
        "verdict": "deploy",
        "proof": {},
    }
    with closing(open_database()) as database:
        return register(database, run.folder, name, about, by="test")[0]


def train_here(run: Run, terms: Terms = Terms()) -> None:
    """`train_run` without supervisor and worker process."""
    if run.record["status"] == "done":
        return
    with Journal(run.folder / EVENTS) as events:
        events.append("supervisor_started", fingerprint=read_machine().fingerprint)
    result = do(Train(run.folder, run.model, run.snapshot.folder))
    terms.on_step(result["steps"])
    document = {"status": "done", "rows": asdict(account(run, result["steps"]))}
    update_record(run.folder, status="done", result=document)
    write_manifest(run.folder, {"kind": "run"})


def do(task: Any) -> dict[str, Any]:
    """The task in this process."""
    module = importlib.import_module(ENTRIES[type(task)])
    result: dict[str, Any] = module.main(task, Heartbeat(None))
    return result


def run_here(task: Any, folder: Path, **_: Any) -> Outcome:
    folder.mkdir(parents=True, exist_ok=True)
    return Outcome("done", 0, None, 0.0, do(task), "")


def _measured_again(run: Run) -> None:
    raise AssertionError(f"{run.folder} has the choices of the shared adapter, and is measured again")


def without_processes(patch: pytest.MonkeyPatch) -> None:
    """Tasks and trainings run in this process; answers, which llama.cpp gives, are left out: the loss alone decides."""
    patch.setenv("OMP_NUM_THREADS", "1")
    for module in (runs, survey):
        patch.setattr(module, "run_task", run_here)
    patch.setattr(runs, "train_run", train_here)
    patch.setattr(runs, "probe_run", _measured_again)
    patch.setattr(runs, "evaluate_run", lambda run, report: {})
    patch.setattr(runs, "judge_run", lambda run: Verdict("deploy", ("planted",), ()))
    patch.setattr(runs, "register_run", lambda folder, name: (registered(load_run(folder), name), True))
    for module in (routes, station):
        patch.setattr(module, "as_served", lambda found, report: (None, "the base as it is trained"))


def losses_of(run: Path) -> list[float]:
    return [entry["loss"] for entry in read_journal(run / "metrics.jsonl") if entry["event"] == "step"]


@contextmanager
def planted_home(folder: Path) -> Iterator[None]:
    """A home of its own, in which nothing starts a process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HIVETUNE_HOME", str(folder))
        without_processes(patch)
        yield
