"""Greedy answers of base and tuned model by the engine, where llama.cpp can't give them."""

import time
from typing import Any

from tokenizers import Tokenizer
from torch import nn

from hivetune.judge.worker.generate import Completion, answer_prompts
from hivetune.judge.worker.sides import Scoring, in_turns
from hivetune.judge.worker.turns import BothModels, blocks
from hivetune.models.prepared import read_prepared
from hivetune.process.protocol import Beat, Generate
from hivetune.train.worker.device import peak_memory_bytes, reset_peak_memory
from hivetune.train.worker.model.general import load_module
from hivetune.train.worker.model.protocol import Document, read_documents


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
