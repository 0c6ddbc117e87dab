"""Base and tuned model on the same rows: loss of each row, greedy answers, latency and memory.

The loss is that of the adapter beside the base, as trained. Answers of the tuned model come from the merged weights,
as they are shipped. Both models are asked in turns (turns.py).
"""

import gc
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import nn

from hivetune.base.disk import write_atomic
from hivetune.base.journal import Journal
from hivetune.config import LoraConfig
from hivetune.data.snapshot import Snapshot, open_snapshot
from hivetune.engine.device import complete, peak_memory_bytes, reset_peak_memory, start_with
from hivetune.engine.model.adapter import fill, read_adapter
from hivetune.engine.model.general import load_module
from hivetune.engine.model.load import load_model
from hivetune.engine.model.protocol import Document
from hivetune.engine.score.generate import Completion, answer_prompts
from hivetune.engine.score.turns import BothModels, SideName, blocks, in_turns, noise_of
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
    heartbeat: Heartbeat


def main(task: Score, heartbeat: Heartbeat) -> dict[str, Any]:
    heartbeat.beat(Beat.PREPARING)
    choices = complete(task.device, task.dtype, choices_of(task.adapter))
    device, dtype = start_with(choices)
    write_atomic(task.scores, b"")
    with Journal(task.scores) as lines:
        scoring = Scoring(
            model=task.model,
            adapter=task.adapter,
            snapshot=open_snapshot(task.snapshot),
            device=device,
            dtype=dtype,
            choices=choices,
            sides={"base": Side(), "tuned": Side()} if task.adapter else {"base": Side()},
            lines=lines,
            heartbeat=heartbeat,
        )
        path = score_losses(scoring, task.rows) if task.rows else None
        gc.collect()
        noise = score_answers(scoring, task.generate) if task.generate.rows else None
    summaries: dict[str, Any] = {name: side.summary() for name, side in scoring.sides.items()}
    return {**summaries, "path": path, "noise": noise, "choices": choices.made()}


def choices_of(adapter: Path | None) -> Choices:
    """What the run that made the adapter measured, so that it is scored in the precision that it was trained in."""
    if adapter is None or not (adapter / CONFIG).is_file():
        return Choices()
    return read_resolved(adapter)[1]


def score_losses(scoring: Scoring, rows: Sequence[int]) -> str:
    """A line {"model", "row", "nll", "tokens"} for each row and model; nll in nats, null when it is not finite."""
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
        documents = read_documents(scoring.snapshot, rows[starts[block] : starts[block] + ROWS_TOGETHER])
        started = time.perf_counter()
        sums = model.nll(documents, adapter=name == "tuned").tolist()
        side.loss_seconds += time.perf_counter() - started
        for document, nll in zip(documents, sums, strict=True):
            tokens = int(document.trained_L.sum())
            finite = nll if math.isfinite(nll) else None
            scoring.lines.append("loss", model=name, row=document.row, nll=finite, tokens=tokens)
            side.nll += nll
            side.tokens += tokens
            scoring.heartbeat.beat(Beat.ITEM)
    return model.path


def score_answers(scoring: Scoring, wanted: Generate) -> float | None:
    """A line {"model", "row", "answer", "ended", "seconds", "new_tokens", "block"} for each row and model.

    Returns the noise of the machine (turns.py).
    """
    tokenizer = Tokenizer.from_file(str(scoring.model / "tokenizer.json"))
    asked = [split_last_answer(document) for document in read_documents(scoring.snapshot, wanted.rows)]
    prompts = [prompt for prompt, _ in asked]
    ends = set(read_prepared(scoring.model).eos_ids) | {answer[-1] for _, answer in asked}

    def load() -> nn.Module:
        return load_module(scoring.model, dtype=scoring.dtype, device=scoring.device, choices=scoring.choices)

    both = BothModels(load, scoring.adapter, prompts)
    parts = blocks(prompts, wanted.slots)
    probes_s = []
    for block, name in in_turns(tuple(scoring.sides), len(parts)):
        side, part = scoring.sides[name], parts[block]
        both.turn_to(name)
        probes_s.append(both.probe_s())
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
        side.answer_seconds += time.perf_counter() - started
        side.peak_memory_bytes = max(side.peak_memory_bytes, peak_memory_bytes(scoring.device) - both.idle_bytes)
        for answer in finished:
            side.latencies.append(answer.seconds)
            side.new_tokens += len(answer.tokens) + answer.ended
            scoring.lines.append(
                "answer",
                model=name,
                row=wanted.rows[part[answer.prompt]],
                answer=tokenizer.decode(answer.tokens, skip_special_tokens=True),
                ended=answer.ended,
                seconds=round(answer.seconds, 6),
                new_tokens=len(answer.tokens),
                block=block,
            )
            scoring.heartbeat.beat(Beat.ITEM)
    return noise_of(probes_s)


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
