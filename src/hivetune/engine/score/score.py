"""Base and tuned model on the same rows: loss of each row, greedy answers, latency and memory.

The loss is that of the adapter beside the base, as trained. Answers of the tuned model come from the merged weights,
as they are shipped. Both models are asked in turns (turns.py).
"""

import gc
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import nn

from hivetune.base.journal import DAMAGED, Journal, read_journal
from hivetune.config import LoraConfig
from hivetune.data.snapshot import Snapshot, open_snapshot
from hivetune.engine.device import complete, peak_memory_bytes, reset_peak_memory, start_with
from hivetune.engine.measure.rank import rank_use
from hivetune.engine.model.adapter import fill, read_adapter
from hivetune.engine.model.general import load_module
from hivetune.engine.model.load import load_model
from hivetune.engine.model.protocol import Document
from hivetune.engine.score.divergence import divergence_from_base
from hivetune.engine.score.generate import Completion, answer_prompts
from hivetune.engine.score.turns import BothModels, SideName, blocks, in_turns
from hivetune.engine.train.feed import read_documents
from hivetune.models.prepared import read_prepared
from hivetune.process.child import Heartbeat, run_child
from hivetune.process.protocol import Beat, Generate, Score
from hivetune.run.choices import Choices, read_resolved
from hivetune.run.folder import CONFIG

# Rows whose loss is computed together: enough for the engine to pack them well, few enough to beat often.
ROWS_TOGETHER = 32


@dataclass
class Side:
    """What one model cost: sums over its rows and answers."""

    nll: float = 0.0
    tokens: int = 0
    loss_seconds: float = 0.0
    new_tokens: int = 0
    answer_seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)
    peak_memory_bytes: int = 0

    def add_loss(self, line: Mapping[str, Any]) -> None:
        self.nll += math.nan if line["nll"] is None else line["nll"]
        self.tokens += line["tokens"]

    def add_turn(self, turn: Mapping[str, Any], answers: Iterable[Mapping[str, Any]]) -> None:
        for answer in answers:
            self.latencies.append(answer["seconds"])
            self.new_tokens += answer["new_tokens"] + answer["ended"]
        self.answer_seconds += turn["seconds"]
        self.peak_memory_bytes = max(self.peak_memory_bytes, turn["peak_memory_bytes"])

    def summary(self) -> dict[str, Any]:
        answers = len(self.latencies)
        return {
            "loss": self.nll / self.tokens if self.tokens and math.isfinite(self.nll) else None,
            "tokens": self.tokens,
            "loss_seconds": round(self.loss_seconds, 3),
            "answers": answers,
            "latency_s": sum(self.latencies) / answers if answers else None,
            "tokens_per_second": self.new_tokens / self.answer_seconds if self.answer_seconds else None,
            "peak_memory_bytes": self.peak_memory_bytes,
        }


@dataclass(frozen=True)
class Scoring:
    """What a score task works with."""

    model: Path
    adapter: Path | None
    snapshot: Snapshot
    device: torch.device
    dtype: torch.dtype
    choices: Choices
    sides: Mapping[SideName, Side]
    lines: Journal
    known: "Known"
    heartbeat: Heartbeat


@dataclass
class Known:
    """What an earlier task has left in `scores`: the rows of each model whose loss is there, and the finished turns."""

    losses: set[tuple[str, int]] = field(default_factory=set)
    turns: set[tuple[str, int]] = field(default_factory=set)
    probes_s: list[float] = field(default_factory=list)


def main(task: Score, heartbeat: Heartbeat) -> dict[str, Any]:
    heartbeat.beat(Beat.PREPARING)
    choices = complete(task.device, task.dtype, choices_of(task.adapter))
    device, dtype = start_with(choices)
    sides: dict[SideName, Side] = {"base": Side(), "tuned": Side()} if task.adapter else {"base": Side()}
    known = read_known(task.scores, sides)
    with Journal(task.scores) as lines:
        scoring = Scoring(
            model=task.model,
            adapter=task.adapter,
            snapshot=open_snapshot(task.snapshot),
            device=device,
            dtype=dtype,
            choices=choices,
            sides=sides,
            lines=lines,
            known=known,
            heartbeat=heartbeat,
        )
        path, divergence = score_losses(scoring, task.rows) if task.rows else (None, None)
        gc.collect()
        if task.generate.rows:
            score_answers(scoring, task.generate)
    summaries: dict[str, Any] = {name: side.summary() for name, side in sides.items()}
    rank = None
    if task.adapter is not None:
        lora, tensors = read_adapter(task.adapter)
        rank = rank_use(tensors, lora)
    made = {"path": path, "probes_s": known.probes_s, "rank": rank, "kl_to_base": divergence}
    return {**summaries, **made, "choices": choices.made()}


def read_known(scores: Path, sides: Mapping[SideName, Side]) -> Known:
    """What is there is added to `sides` and not computed again. A turn that broke off is; damaged lines are."""
    known = Known()
    answers: dict[tuple[str, int], dict[int, dict[str, Any]]] = {}
    for line in read_journal(scores) if scores.exists() else ():
        if line["event"] == DAMAGED or line["model"] not in sides:
            continue
        side = sides[line["model"]]
        if line["event"] == "loss" and (line["model"], line["row"]) not in known.losses:
            known.losses.add((line["model"], line["row"]))
            side.add_loss(line)
        elif line["event"] == "answer":
            answers.setdefault((line["model"], line["block"]), {})[line["row"]] = line
        elif line["event"] == "turn":
            turn = (line["model"], line["block"])
            known.turns.add(turn)
            known.probes_s.append(line["probe_s"])
            side.add_turn(line, answers.get(turn, {}).values())
    return known


def choices_of(adapter: Path | None) -> Choices:
    """What the run that made the adapter measured, so that it is scored in the precision that it was trained in."""
    if adapter is None or not (adapter / CONFIG).is_file():
        return Choices()
    return read_resolved(adapter)[1]


def score_losses(scoring: Scoring, rows: Sequence[int]) -> tuple[str | None, dict[str, Any] | None]:
    """A line {"model", "row", "nll", "tokens"} for each row and model; nll in nats, null when it is not finite.

    Returns the path of the model and the divergence of the tuned from the base model (divergence.py); None and None
    when every line was there before.
    """
    missing = {name: [row for row in rows if (name, row) not in scoring.known.losses] for name in scoring.sides}
    if not any(missing.values()):
        return None, None
    lora, tensors = (LoraConfig(r=1), None) if scoring.adapter is None else read_adapter(scoring.adapter)
    model = load_model(
        scoring.model,
        lora,
        method="lora",
        dtype=scoring.dtype,
        device=scoring.device,
        choices=scoring.choices,
    )
    if tensors is not None:
        fill(model.adapter, tensors, str(scoring.adapter))
    starts = range(0, len(rows), ROWS_TOGETHER)
    for block, name in in_turns(tuple(scoring.sides), len(starts)):
        side = scoring.sides[name]
        wanted = [row for row in rows[starts[block] : starts[block] + ROWS_TOGETHER] if row in set(missing[name])]
        if not wanted:
            continue
        documents = read_documents(scoring.snapshot, wanted)
        started = time.perf_counter()
        sums = model.nll(documents, adapter=name == "tuned").tolist()
        side.loss_seconds += time.perf_counter() - started
        for document, nll in zip(documents, sums, strict=True):
            tokens = int(document.trained_L.sum())
            finite = nll if math.isfinite(nll) else None
            line = scoring.lines.append("loss", model=name, row=document.row, nll=finite, tokens=tokens)
            side.add_loss(line)
            scoring.heartbeat.beat(Beat.ITEM)
    if scoring.adapter is None:
        return model.path, None
    return model.path, divergence_from_base(model, read_documents(scoring.snapshot, rows), scoring.heartbeat)


def score_answers(scoring: Scoring, wanted: Generate) -> None:
    """A line {"model", "row", "answer", "ended", "seconds", "new_tokens", "block"} for each row and model, and one for
    each finished turn: {"model", "block", "seconds", "peak_memory_bytes", "probe_s"} (turns.py)."""
    tokenizer = Tokenizer.from_file(str(scoring.model / "tokenizer.json"))
    asked = [split_last_answer(document) for document in read_documents(scoring.snapshot, wanted.rows)]
    prompts = [prompt for prompt, _ in asked]
    ends = set(read_prepared(scoring.model).eos_ids) | {answer[-1] for _, answer in asked}
    parts = blocks(prompts, wanted.slots)
    turns = [turn for turn in in_turns(tuple(scoring.sides), len(parts)) if turn[::-1] not in scoring.known.turns]
    if not turns:
        return

    def load() -> nn.Module:
        return load_module(scoring.model, dtype=scoring.dtype, device=scoring.device, choices=scoring.choices)

    both = BothModels(load, scoring.adapter, prompts)
    for block, name in turns:
        part = parts[block]
        both.turn_to(name)
        probe_s = both.probe_s()
        scoring.known.probes_s.append(probe_s)
        reset_peak_memory(scoring.device)
        finished: list[Completion] = []
        started = time.perf_counter()
        answer_prompts(
            both.module,
            [prompts[index] for index in part],
            ends=ends,
            new_tokens=wanted.new_tokens,
            slots=wanted.slots,
            cached=both.cached,
            on_answer=finished.append,
        )
        seconds = time.perf_counter() - started
        memory = max(0, peak_memory_bytes(scoring.device) - both.idle_bytes)
        answers = [_answer_line(answer, wanted.rows[part[answer.prompt]], tokenizer) for answer in finished]
        for answer in answers:
            scoring.lines.append("answer", model=name, block=block, **answer)
            scoring.heartbeat.beat(Beat.ITEM)
        turn = {"seconds": seconds, "peak_memory_bytes": memory, "probe_s": probe_s}
        scoring.lines.append("turn", model=name, block=block, **turn)
        scoring.sides[name].add_turn(turn, answers)


def _answer_line(answer: Completion, row: int, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "row": row,
        "answer": tokenizer.decode(answer.tokens, skip_special_tokens=True),
        "ended": answer.ended,
        "seconds": round(answer.seconds, 6),
        "new_tokens": len(answer.tokens),
    }


def split_last_answer(document: Document) -> tuple[list[int], list[int]]:
    """The tokens up to the last trained stretch, and that stretch: the prompt exactly as it was trained on."""
    tokens, trained = document.tokens_L.tolist(), document.trained_L.tolist()
    end = max(i for i, is_trained in enumerate(trained) if is_trained) + 1
    start = end
    while trained[start - 1]:
        start -= 1
    return tokens[:start], tokens[start:end]


if __name__ == "__main__":
    run_child(main, Score)
