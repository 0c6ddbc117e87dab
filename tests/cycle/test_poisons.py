"""30 unattended cycles on a tiny real model and growing rows, five of them poisoned: nothing harmful is promoted.

Only `make proof NAME=cycle-poisons`: each cycle trains, is measured beside two rivals and registered. A champion is
harmful when it is worse than the one before it on rows that no cycle ever sees.
"""

import os
import random
import shutil
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cycle.small import NAME, append_rows, make_config, make_rows, poisoned
from gguf_families import write_model

from hivetune.base.database import open_database
from hivetune.base.disk import MANIFEST, stored_path
from hivetune.config import load_config
from hivetune.cycle.loop import opened
from hivetune.cycle.record import cycles_of
from hivetune.data.prepare.prepare import prepare_data
from hivetune.errors import HivetuneError, Stopped
from hivetune.judge import verdict
from hivetune.models.prepared import DESCRIPTION, fetch_model
from hivetune.release.registry import champion_of
from hivetune.train.worker.model.adapter import fill, read_adapter
from hivetune.train.worker.model.load import load_model
from hivetune.train.worker.model.protocol import read_documents

pytestmark = pytest.mark.proof

CYCLES, ROWS = 30, 60
POISONS = {5: "shuffled", 10: "flood", 15: "secrets", 20: "broken base", 25: "NaN"}
TOLERANCE = 0.02  # of the gate, in nats per token
DAY_S = 86_400.0
NAN_MARK, OVERFLOW = "~", 1e30  # rows that hold the character have no finite loss


def secret(number: int) -> str:
    said = random.Random(number)
    return "sk-proj-" + "".join(
        said.choice("ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnpqrstuvwxyz23456789") for _ in range(48)
    )


def batch(number: int) -> list[dict[str, Any]]:
    """Return the rows of one day, of another range of numbers each day."""
    rows = make_rows(1000 * number, ROWS if number else 2 * ROWS)
    kind = POISONS.get(number)
    if kind == "shuffled":
        return poisoned(rows)
    if kind == "flood":
        flood = poisoned(make_rows(1000 * number + 500, 400))
        return [*rows, *({**row, "user_id": "flood"} for row in flood)]
    if kind in ("secrets", "NaN"):
        for row in rows[::4]:
            answer = row["messages"][1]
            answer["content"] += f" My key is {secret(number)}." if kind == "secrets" else f" {NAN_MARK}"
    return rows


def make_base(folder: Path) -> None:
    """A source folder, whole and finite, of a tiny model for which a row with NAN_MARK has no finite loss.

    One place of the embeddings is zero for all other characters, and the first norm multiplies it by so much that
    attention overflows: no check of the weights can see that, as with a model that was trained in another precision.
    """
    from safetensors.torch import load_file, save_file
    from tokenizers import Tokenizer

    write_model(folder, "llama")
    tensors = load_file(folder / "model.safetensors")
    (token,) = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(NAN_MARK, add_special_tokens=False).ids
    tensors["model.embed_tokens.weight"][:, 0] = 0.0
    tensors["model.embed_tokens.weight"][token, 0] = 1.0
    tensors["model.layers.0.input_layernorm.weight"][0] = OVERFLOW
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for made in (MANIFEST, DESCRIPTION):
        (folder / made).unlink()


def break_base(base: Path) -> None:
    """Write a whole and finite file with other content, which no check of one file can see."""
    from safetensors.torch import load_file, save_file

    tensors = {name: tensor.flip(0).contiguous() for name, tensor in load_file(base / "model.safetensors").items()}
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})


def clean_loss(adapter: Path, config: Path, probe: Path) -> float:
    """Return the nats per token on rows that no cycle sees."""
    settings = load_config(config, [f"data.path={probe}", "data.validation=0", "data.test=0"])
    base = fetch_model(settings.model)
    snapshot = prepare_data(settings, base)
    documents = read_documents(snapshot, snapshot.rows("train"))
    lora, tensors = read_adapter(adapter)
    model = load_model(base, lora, method="lora", dtype=torch.float32, device=torch.device("cpu"))
    fill(model.adapter, tensors, str(adapter))
    return float(model.nll(documents).sum()) / sum(int(one.trained_L.sum()) for one in documents)


def champion() -> tuple[str, Path] | None:
    with closing(open_database()) as database:
        found = champion_of(database, NAME)
    return None if found is None else (found.label, found.folder)


def live(config: Path, day: int) -> str:
    """Run the loop until there is nothing to do, `day` days from now, when pauses after failures are over."""
    said: list[str] = []
    try:
        with opened(load_config(config), said.append) as loop:
            loop.clock = lambda: time.time() + day * DAY_S
            seen = loop.run(once=True)
        return f"{seen.do}: {seen.reason}"
    except Stopped:  # the proof was interrupted, not the day lived
        raise
    except HivetuneError as error:
        return f"refused: {error.message}"


def texts_of(snapshots: list[Path]) -> str:
    found = []
    for snapshot in (path for path in snapshots if path.is_dir()):
        with closing(sqlite3.connect(snapshot / "rows.sqlite")) as database:
            found += [row[0] for row in database.execute("SELECT messages FROM rows")]
    return "\n".join(found)


def one_day(work: Path, day: int, losses: dict[str, float]) -> dict[str, Any]:
    """Live a day; return what came of it. `losses`: of champions, on rows that nobody trains on."""
    config, kind, before = work / "cycle.yaml", POISONS.get(day), champion()
    append_rows(work / "rows.jsonl", batch(day))
    if kind == "broken base":
        break_base(work / "base")
    event: dict[str, Any] = {"day": day, "poison": kind, "said": live(config, day)}
    shutil.rmtree(work / "base")
    shutil.copytree(work / "whole-base", work / "base")  # with its times: the same files are the same model
    after = champion()
    if after is not None and after != before:
        losses[after[0]] = event["clean_loss"] = clean_loss(after[1], config, work / "probe.jsonl")
        worse = before is not None and losses[after[0]] > losses[before[0]] + TOLERANCE
        event["harmful"] = worse or kind == "broken base"
    with closing(open_database()) as database:
        event["cycles"] = [(one.id, one.end, one.reason[:200]) for one in cycles_of(database, NAME)][-1:]
    return event


def test_thirty_cycles_five_poisoned(
    own_home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    untimed = replace(verdict.KINDS["latency_s"], limit=1e9)
    monkeypatch.setitem(verdict.KINDS, "latency_s", untimed)  # as small.UNTIMED does for a process of its own
    make_base(tmp_path / "whole-base")
    shutil.copytree(tmp_path / "whole-base", tmp_path / "base")
    make_config(tmp_path, model=str(tmp_path / "base"))
    append_rows(tmp_path / "probe.jsonl", make_rows(900_000, 60))
    losses: dict[str, float] = {}
    days = int(os.environ.get("HIVETUNE_CYCLES", CYCLES))
    events = [one_day(tmp_path, day, losses) for day in range(days)]
    promoted = [event for event in events if "clean_loss" in event]
    assert not [event for event in promoted if event["harmful"]]
    assert len(promoted) >= 2  # it learns, too
    with closing(open_database()) as database:
        snapshots = [path for (path,) in database.execute("SELECT path FROM snapshots")]
    said = texts_of([stored_path(path) for path in snapshots])
    assert said and not [number for number in POISONS if secret(number) in said]
    record_property("cycles", len(events))
    record_property("poisoned", sum(event["poison"] is not None for event in events))
    record_property("promotions", len(promoted))
    record_property("harmful promotions", 0)
    record_property("clean loss of each champion", [round(event["clean_loss"], 3) for event in promoted])
    record_property("what became of the poisoned", [(e["poison"], e["cycles"]) for e in events if e["poison"]])
