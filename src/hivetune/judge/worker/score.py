"""Base and tuned model on the same rows: loss of each row, greedy answers, latency and memory.

The loss is that of the adapter beside the base, as trained. Answers (answers.py) of the tuned model come from the
merged weights, as they are shipped. Both models are asked in turns.
"""

import gc
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from hivetune.base.journal import DAMAGED, Journal, read_journal
from hivetune.config import LoraConfig
from hivetune.data.snapshot import Snapshot, open_snapshot
from hivetune.judge.worker.generate import PROBE_TOKENS, Completion, answer_prompts, settle_module
from hivetune.judge.worker.rank import rank_use
from hivetune.machine.inventory import read_machine
from hivetune.models.prepared import read_prepared
from hivetune.process.child import Heartbeat, run_child
from hivetune.process.protocol import Beat, Generate, Score
from hivetune.release.worker.merge import Delta, add_delta, is_transposed, pair_up
from hivetune.run.choices import Choices, read_resolved
from hivetune.run.folder import CONFIG
from hivetune.train.worker.device import complete, peak_memory_bytes, reset_peak_memory, start_with
from hivetune.train.worker.model.adapter import fill, read_adapter
from hivetune.train.worker.model.fast.kernels.build import why_no_kernels
from hivetune.train.worker.model.general import load_module
from hivetune.train.worker.model.load import load_model
from hivetune.train.worker.model.protocol import Document, LoraModel, read_documents

SideName = Literal["base", "tuned"]


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


def in_turns(sides: Sequence[SideName], count: int) -> list[tuple[int, SideName]]:
    """Return (block, model) in the order of answering; a model stays for the first turn of the next block."""
    turns: list[tuple[int, SideName]] = []
    for block in range(count):
        turns += [(block, side) for side in (sides if block % 2 == 0 else reversed(sides))]
    return turns


# Rows whose loss is computed together: enough for the engine to pack them well, few enough to beat often.
ROWS_TOGETHER = 32


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
            # transformers costs 3.5 s of processor time; losses do without on the fast path.

            score_answers(scoring, task.generate)
    summaries: dict[str, Any] = {name: side.summary() for name, side in sides.items()}
    rank = None
    if task.adapter is not None:
        lora, tensors = read_adapter(task.adapter)
        rank = rank_use(tensors, lora)
    made = {"path": path, "probes_s": known.probes_s, "rank": rank, "kl_to_base": divergence}
    return {**summaries, **made, "choices": choices.made()}


def read_known(scores: Path, sides: Mapping[SideName, Side]) -> Known:
    """Add what earlier tasks found to `sides`, so that it is not computed again.

    A turn that broke off and damaged lines are computed again.
    """
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
    """Return the choices of the run that made the adapter, so that it is scored in the precision of its training.

    Where its kernels can't be had the plain ones score: only a training must not go on with others.
    """
    if adapter is None or not (adapter / CONFIG).is_file():
        return Choices()
    choices = read_resolved(adapter)[1]
    return replace(choices, kernels="torch") if choices.kernels == "native" and why_no_kernels() else choices


def score_losses(scoring: Scoring, rows: Sequence[int]) -> tuple[str | None, dict[str, Any] | None]:
    """Write a line {"model", "row", "nll", "tokens"} for each row and model; nll in nats, null when it is not finite.

    Returns the path of the model and the divergence of the tuned from the base model; None and None
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


# KL(tuned || base) on trained tokens predicts how much of its other abilities a model forgot, better than its loss
# does (arXiv 2509.04259). It is reported, and decides nothing.

# The mean over some thousand tokens is known to a few percent; logits of longer rows would take gigabytes.
MAX_DIVERGENCE_ROWS, MAX_ROW = 32, 512


def divergence_from_base(
    model: LoraModel, documents: Sequence[Document], heartbeat: Heartbeat
) -> dict[str, Any] | None:
    """Return {"nats_per_token", "tokens", "rows"} over the trained tokens of at most MAX_DIVERGENCE_ROWS documents.
    `nats_per_token` is null when it is not finite.
    """
    short = [one for one in documents if len(one.tokens_L) <= MAX_ROW and bool(one.trained_L.any())]
    chosen = short[:: max(1, -(-len(short) // MAX_DIVERGENCE_ROWS))]
    if not chosen:
        return None
    total, tokens = 0.0, 0
    for document in chosen:
        ids, position_M = document.tokens_L.tolist(), document.trained_L.nonzero()[:, 0] - 1
        tuned_MV, base_MV = (_logp(model, ids, position_M, adapter) for adapter in (True, False))
        total += float((tuned_MV.exp() * (tuned_MV - base_MV)).sum())
        tokens += len(position_M)
        heartbeat.beat(Beat.ITEM)
    mean = total / tokens
    return {
        "nats_per_token": mean if torch.isfinite(torch.tensor(mean)) else None,
        "tokens": tokens,
        "rows": len(chosen),
    }


def _logp(model: LoraModel, ids: Sequence[int], position_M: Tensor, adapter: bool) -> Tensor:
    """Return log-probabilities [M, V] in fp32 of what follows each position."""
    return torch.log_softmax(model.logits(ids, adapter=adapter)[position_M.to(model.device)].float(), -1)


# Answers by the engine, where llama.cpp can't give them.


def score_answers(scoring: Scoring, wanted: Generate) -> None:
    """Write a line {"model", "row", "answer", "ended", "seconds", "new_tokens", "block"} for each row and model.

    Each finished turn has a line too: {"model", "block", "seconds", "peak_memory_bytes", "probe_s"}.
    """
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
    """Split the tokens before the last trained stretch from that stretch: the prompt exactly as it was trained on."""
    tokens, trained = document.tokens_L.tolist(), document.trained_L.tolist()
    end = max(i for i, is_trained in enumerate(trained) if is_trained) + 1
    start = end
    while trained[start - 1]:
        start -= 1
    return tokens[:start], tokens[start:end]


# Both models take turns, a few prompts at a time, so that any load meets both. One whole model after the other made
# the verdict follow the load: one adapter got `deploy`, then twice `not-enough-evidence`. In the order base, tuned,
# tuned, base, a load that grows or fades favours neither.

# Blocks are the units of the interval on latency: with 12 of them Student's t is 1.12 times the normal quantile.
MIN_BLOCKS = 12
# Of the memory that is free, how much a second set of weights may take; caches and activations need the rest.
SHARE_FOR_WEIGHTS = 0.5


def blocks(prompts: Sequence[Sequence[int]], slots: int) -> list[list[int]]:
    """Divide the prompts' indices into blocks of at most `slots`, at least MIN_BLOCKS where there are as many prompts.

    By length, longest first: prompts of a block are computed together, padded to the longest.
    """
    order = sorted(range(len(prompts)), key=lambda i: (-len(prompts[i]), i))
    width = max(1, min(slots, len(prompts) // MIN_BLOCKS))
    return [order[start : start + width] for start in range(0, len(order), width)]


class BothModels:
    """One module that is the base or the tuned model, with merged weights as they are shipped.

    Where memory allows, the adapted weights are kept twice and exchanged. Else the tuned ones replace the base's, and
    the base is read again for its next turn.
    """

    def __init__(self, load: Callable[[], nn.Module], adapter: Path | None, prompts: Sequence[Sequence[int]]):
        self._load = load
        self.module = load()
        self.side: SideName = "base"
        self.cached = settle_module(self.module, prompts)  # and the warm-up
        self._attention = self.module.config._attn_implementation
        self._probe = min(prompts, key=len)[:PROBE_TOKENS]
        self._deltas: Mapping[str, Delta] = {}
        self._idle: dict[str, Tensor] = {}  # the adapted weights of the model whose turn it is not
        if adapter is not None:
            lora, tensors = read_adapter(adapter)
            self._deltas = pair_up(tensors, lora)
        size_bytes = sum(self.module.get_parameter(name).nbytes for name in self._deltas)
        if size_bytes <= SHARE_FOR_WEIGHTS * _free_bytes(next(self.module.parameters()).device):
            self._idle = {name: self._merged(name) for name in self._deltas}

    @property
    def idle_bytes(self) -> int:
        """Return the bytes of the model whose turn it is not; a model that is served alone does without them."""
        return sum(tensor.nbytes for tensor in self._idle.values())

    @torch.no_grad()
    def turn_to(self, side: SideName) -> None:
        if side == self.side:
            return
        if self._idle:
            for name, waiting in self._idle.items():
                parameter = self.module.get_parameter(name)
                self._idle[name], parameter.data = parameter.data, waiting
        elif side == "tuned":
            for name in self._deltas:
                self.module.get_parameter(name).copy_(self._merged(name))
        else:
            del self.module
            gc.collect()
            self.module = self._load()
            if self.module.config._attn_implementation != self._attention:
                self.module.set_attn_implementation(self._attention)
        self.side = side

    @torch.no_grad()
    def probe_s(self) -> float:
        """Return the seconds of a forward pass that is always the same: a difference comes from the machine."""
        tokens_1P = torch.tensor([list(self._probe)], device=next(self.module.parameters()).device)
        started = time.perf_counter()
        self.module(input_ids=tokens_1P, use_cache=False).logits[0, -1].argmax().item()  # waits for the device
        return time.perf_counter() - started

    @torch.no_grad()
    def _merged(self, name: str) -> Tensor:
        """Return W + scale * B A, rounded once to the weight's precision."""
        weight, owner = self.module.get_parameter(name), self.module.get_submodule(name.rpartition(".")[0])
        return add_delta(weight, self._deltas[name], transposed=is_transposed(owner)).to(weight.dtype).contiguous()


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return read_machine().available_bytes


if __name__ == "__main__":
    run_child(main, Score)
