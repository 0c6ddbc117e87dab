"""The station that makes a prepared folder of a model's name."""

import glob
import itertools
import os
import shutil
from pathlib import Path

import psutil

from hivetune.models.prepared import TemplateArguments, find_prepared, folder_for
from hivetune.process.parent import run_task
from hivetune.process.protocol import PrepareModel
from hivetune.records import Progress, silent

# This lies apart from prepared.py, which each data worker imports: pydantic, which the protocol imports, takes 0.3 s.

# What huggingface_hub takes for yes in HF_HUB_OFFLINE.
OFFLINE = ("1", "on", "yes", "true")


def fetch_model(name: str, progress: Progress = silent, template: TemplateArguments | None = None) -> Path:
    """Return the prepared folder of a model (Hub id, folder, GGUF file, smollm2-135m), made on first use.

    `template`: values for arguments of its chat template; the folder is one of its own. Raises UsageError for a name
    that is not a model and for an argument that the template does not read, MachineNotFit without the packages or the
    network that it takes.
    """
    prepared = find_prepared(name, template)
    if prepared is not None:
        return prepared.folder
    plain = fetch_model(name, progress) if template else Path()
    folder = folder_for(name, template)
    task = PrepareModel(name, folder, os.environ.get("HF_HUB_OFFLINE", "").lower() in OFFLINE, template or {}, plain)
    beats = itertools.count(1)
    try:
        outcome = run_task(
            task, folder.with_name(f".{folder.name}.task"), on_beat=lambda beat: progress(next(beats), None)
        )
    finally:  # removes unfinished copies whose task was killed (models/worker/prepare_model.py names them)
        for path in folder.parent.glob(f".{glob.escape(folder.name)}.*.tmp"):
            owner = path.name.removeprefix(f".{folder.name}.").removesuffix(".tmp")
            if owner.isdigit() and not psutil.pid_exists(int(owner)):
                shutil.rmtree(path, ignore_errors=True)
    outcome.check(f"preparing {name}")
    return folder
