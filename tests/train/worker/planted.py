"""Runs of both stages on a tiny model with a planted fault: answers to some prompts end with a boilerplate tail.

A prompt is [1, style, a, b, 60], its answer [a + 1, b + 1, ..., a + 4, b + 4], then TAIL or not, then the end token.
Of unlabelled rows those with seven of the twenty words at b have the tail nine times in ten, 31 % of all. Rows with
feedback are disliked where they have it.
"""

import random
import sqlite3
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from train.worker.models import write_model

from hivetune.base.disk import sha256_bytes, write_json, write_manifest
from hivetune.base.journal import read_journal
from hivetune.config import RunConfig, parse_config
from hivetune.data.snapshot import BAD, ROWS_SCHEMA, Snapshot, open_snapshot
from hivetune.process.child import Heartbeat
from hivetune.process.protocol import Train
from hivetune.records import Split
from hivetune.train.open import plan_of
from hivetune.train.plan.steps import write_plan
from hivetune.train.worker import loop
from hivetune.train.worker.model.adapter import fill, read_adapter
from hivetune.train.worker.model.load import load_model
from hivetune.train.worker.model.protocol import LoraModel, read_documents

END, BREAK, TAIL = 2, 60, (70, 71, 72)
STYLES, WORDS = range(3, 15), range(20, 40)
FAULTY = WORDS[:7]
FAULT_SHARE = 0.9


class Row(NamedTuple):
    """`prompt` tokens, `answer` tokens. `split`: bad for a bad answer; `better`: the number of the good one."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    split: str
    better: int | None = None
    liked: bool = False

    @property
    def has_tail(self) -> bool:
        return TAIL[0] in self.answer


def draw(numbers: random.Random, split: str, *, clean: bool = False) -> Row:
    style, a, b = numbers.choice(STYLES), numbers.choice(WORDS), numbers.choice(WORDS)
    told = [20 + (word - 20 + far) % 20 for far in (1, 2, 3, 4) for word in (a, b)]
    tail = not clean and b in FAULTY and numbers.random() < FAULT_SHARE
    return Row((1, style, a, b, BREAK), (*told, *(TAIL if tail else ()), END), split)


def planted_rows(
    seed: int, *, unlabelled: int = 480, rated: int = 240, held_out: int = 92
) -> tuple[list[Row], list[Row]]:
    """(unlabelled and held-out rows, rows with feedback as they came). Validation rows are as unlabelled ones are, with
    some that were liked; test rows are good ones."""
    numbers = random.Random(seed)
    rows = [draw(numbers, "train") for _ in range(unlabelled)]
    rows += [draw(numbers, "validation") for _ in range(held_out)]
    rows += [draw(numbers, "validation", clean=True)._replace(liked=True) for _ in range(held_out // 2)]
    rows += [draw(numbers, "test", clean=True) for _ in range(held_out)]
    return rows, [draw(numbers, "train") for _ in range(rated)]


def judged_by_feedback(rated: Sequence[Row], labels: Sequence[bool]) -> list[Row]:
    """Rows with feedback, each good or bad by its label."""
    return [row._replace(split="train" if good else BAD, liked=good) for row, good in zip(rated, labels, strict=True)]


def write_rows(folder: Path, rows: Sequence[Row]) -> Snapshot:
    """A snapshot of these rows, bad ones included."""
    folder.mkdir(parents=True)
    offsets, tokens, trained = array("Q", [0]), array("I"), bytearray()
    database = sqlite3.connect(folder / "rows.sqlite")
    database.executescript(ROWS_SCHEMA)
    for number, row in enumerate(rows):
        tokens.extend((*row.prompt, *row.answer))
        trained += bytes(len(row.prompt)) + b"\1" * len(row.answer)
        offsets.append(len(tokens))
        lesson = None if row.split != BAD else "failure" if row.better is None else "pair"
        database.execute(
            "INSERT INTO rows (row, id, source, split, tied, length, trained, messages, lesson, better, vouched)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, '[]', ?, ?, ?)",
            (
                number,
                f"{number} {row.prompt} {row.answer}",
                f"rows.jsonl:{number + 1}",
                row.split,
                number,
                len(row.prompt) + len(row.answer),
                len(row.answer),
                lesson,
                row.better,
                row.liked,
            ),
        )
    database.commit()
    database.close()
    (folder / "offsets.u64").write_bytes(offsets.tobytes())
    (folder / "tokens.u32").write_bytes(tokens.tobytes())
    (folder / "trained.u8").write_bytes(trained)
    about = {"num_rows": len(rows), "num_bad": sum(row.split == BAD for row in rows)}
    write_manifest(folder, {"kind": "snapshot", "hash": sha256_bytes(tokens.tobytes() + bytes(trained)), **about})
    return open_snapshot(folder)


@dataclass(frozen=True)
class Bench:
    """A folder with a tiny model and a snapshot; runs are trained in it by the real loop, in this process."""

    folder: Path
    snapshot: Snapshot
    rows: Sequence[Row]

    @property
    def model(self) -> Path:
        return self.folder / "model"

    def train(self, name: str, *, heartbeat: Heartbeat | None = None, **settings: Any) -> dict[str, Any]:
        """The run `name`, begun or gone on with; what its worker said."""
        run = self.folder / name
        if not run.exists():
            run.mkdir()
            config = self.config(**settings)
            resolved = {
                "config": config.model_dump(mode="json"),
                "choices": {"threads": 1, "products": "native"},
            }  # not timed: a busy machine chooses differently
            (run / "config.resolved.yaml").write_text(yaml.safe_dump(resolved))
            write_plan(run, plan_of(config, self.snapshot, "settings"))
        return loop.main(Train(run, self.model, self.snapshot.folder), heartbeat or Heartbeat(None))

    def config(self, **settings: Any) -> RunConfig:
        defaults: dict[str, Any] = {
            "model": "tiny",
            "data": {"path": "none"},
            "lora": {"r": 16, "alpha": 32},
            "batch_size": 16,
            "epochs": 12,
            "learning_rate": 5e-3,
            "dtype": "float32",
            "device": "cpu",
        }
        return parse_config({**defaults, **settings})

    def stage2(
        self, name: str, stage1: str, *, learn: Mapping[str, Any] | None = None, **settings: Any
    ) -> dict[str, Any]:
        lora = {"r": 16, "alpha": 32, "start": str(self.folder / stage1)}
        return self.train(name, lora=lora, learn={"stage": 2, **(learn or {})}, **settings)

    def trained(self, name: str) -> LoraModel:
        """The model with the adapter of a run."""
        cpu = torch.device("cpu")
        model = load_model(self.model, self.config().lora, method="lora", dtype=torch.float32, device=cpu)
        fill(model.adapter, read_adapter(self.folder / name)[1], name)
        return model

    def answers(self, name: str, split: str = "test", most: int = 16) -> list[tuple[int, ...]]:
        """Greedy answers to the prompts of a split, with the end token; as long as `most` where none came."""
        model, found = self.trained(name), []
        for row in self.rows:
            if row.split == split:
                said: list[int] = []
                while len(said) < most and (not said or said[-1] != END):
                    said.append(int(model.logits((*row.prompt, *said))[-1].argmax()))
                found.append(tuple(said))
        return found

    def loss(self, name: str, split: Split = "test") -> float:
        """Nats per trained token of the rows of a split, which are good ones where they are held out."""
        documents = read_documents(self.snapshot, self.snapshot.rows(split))
        return float(self.trained(name).nll(documents).sum()) / sum(int(d.trained_L.sum()) for d in documents)

    def losses(self, name: str, event: str = "validation") -> list[float]:
        return [e["loss"] for e in read_journal(self.folder / name / "metrics.jsonl") if e["event"] == event]


def make_bench(folder: Path, rows: Sequence[Row]) -> Bench:
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "model").exists():
        write_model(folder / "model", hidden_size=64, intermediate_size=128, num_hidden_layers=2)
        described = {"schema": 1, "name": "tiny", "kind": "folder", "source": "tiny", "eos_ids": [END], "pad_id": 0}
        write_json(folder / "model" / "hivetune.json", described)
    snapshot = folder / "snapshot"
    return Bench(folder, open_snapshot(snapshot) if snapshot.exists() else write_rows(snapshot, rows), rows)


def right(rows: Sequence[Row], answers: Sequence[tuple[int, ...]]) -> list[bool]:
    """The checker: an answer without the tail."""
    return [TAIL[0] not in answer for answer in answers]
