"""Greedy answers of base and tuned model by the engine, where llama.cpp can't give them.

The tuned model answers from the merged weights, as they are shipped.
"""

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from hivetune.judge.worker.generate import PROBE_TOKENS, Completion, answer_prompts, settle_module
from hivetune.judge.worker.sides import Scoring, SideName, in_turns
from hivetune.machine.inventory import read_machine
from hivetune.models.prepared import read_prepared
from hivetune.process.protocol import Beat, Generate
from hivetune.release.worker.merge import Delta, add_delta, is_transposed, pair_up
from hivetune.train.worker.device import peak_memory_bytes, reset_peak_memory
from hivetune.train.worker.model.adapter import read_adapter
from hivetune.train.worker.model.general import load_module
from hivetune.train.worker.model.protocol import Document, read_documents


def score_answers(scoring: Scoring, task: Generate) -> None:
    """Write a line {"model", "row", "answer", "ended", "seconds", "new_tokens", "block"} for each row and model.

    Each finished turn has a line too: {"model", "block", "seconds", "peak_memory_bytes", "probe_s"}.
    """
    tokenizer = Tokenizer.from_file(str(scoring.model / "tokenizer.json"))
    questions = [split_last_answer(document) for document in read_documents(scoring.snapshot, task.rows)]
    prompts = [prompt for prompt, _ in questions]
    ends = set(read_prepared(scoring.model).eos_ids) | {answer[-1] for _, answer in questions}
    parts = blocks(prompts, task.slots)
    turns = [turn for turn in in_turns(tuple(scoring.sides), len(parts)) if turn[::-1] not in scoring.stored.turns]
    if not turns:
        return

    def load() -> nn.Module:
        return load_module(scoring.model, dtype=scoring.dtype, device=scoring.device, choices=scoring.choices)

    models = BothModels(load, scoring.adapter, prompts)
    for block, name in turns:
        part = parts[block]
        models.turn_to(name)
        probe_s = models.probe_s()
        scoring.stored.probes_s.append(probe_s)
        reset_peak_memory(scoring.device)
        finished: list[Completion] = []
        started = time.perf_counter()
        answer_prompts(
            models.module,
            [prompts[index] for index in part],
            ends=ends,
            new_tokens=task.new_tokens,
            slots=task.slots,
            cached=models.cached,
            on_answer=finished.append,
        )
        seconds = time.perf_counter() - started
        memory = max(0, peak_memory_bytes(scoring.device) - models.idle_bytes)
        answers = [_answer_line(answer, task.rows[part[answer.prompt]], tokenizer) for answer in finished]
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
        """Return the bytes of the idle model; a model that is served alone does not need them."""
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
        """Return the seconds of a fixed forward pass: a difference comes from the machine."""
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
