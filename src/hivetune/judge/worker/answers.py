"""Greedy answers of base and tuned model by the engine, where llama.cpp can't give them.

The tuned model answers from the merged weights, as they are shipped. Several prompts are answered together, in
slots. All slots end at the same column of the key-value cache and begin where their prompt begins; what lies before is
masked. A slot whose answer ends is given up.

Shapes: S slots, T cached positions, P positions of a prompt, V vocabulary.
"""

import gc
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from hivetune.judge.worker.sides import Scoring, SideName, in_turns
from hivetune.machine.inventory import read_machine
from hivetune.models.prepared import read_prepared
from hivetune.process.protocol import Beat, Generate
from hivetune.release.worker.merge import Delta, add_delta, is_transposed, pair_up
from hivetune.train.worker.device import peak_memory_bytes, reset_peak_memory
from hivetune.train.worker.model.adapter import read_adapter
from hivetune.train.worker.model.general import load_module
from hivetune.train.worker.model.protocol import Document, read_documents

_GROUPED = "hivetune-grouped"
SHELF_ROOM = 64
PROBE_TOKENS = 32


@dataclass
class Completion:
    """Tokens after the prompt, without the one that ended it. `seconds`: from taking the prompt to the last token."""

    prompt: int
    tokens: list[int] = field(default_factory=list)
    ended: bool = False
    seconds: float = 0.0


class Shelf(DynamicLayer):
    """Keys and values of a layer with room for the next tokens: `torch.cat` at every token took a third of its time."""

    keys: Tensor
    values: Tensor
    is_initialized: bool
    _store: tuple[Tensor, Tensor]

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        used = self.keys.shape[2] if self.is_initialized else 0
        end = used + key_states.shape[2]
        if not self.is_initialized or end > self._store[0].shape[2]:
            stores = []
            for old, new in ((self.keys, key_states), (self.values, value_states)):
                store = new.new_zeros((*new.shape[:2], end + SHELF_ROOM, new.shape[3]))
                if used:
                    store[:, :, :used] = old
                stores.append(store)
            self._store = (stores[0], stores[1])
            self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
        self._store[0][:, :, used:end] = key_states
        self._store[1][:, :, used:end] = value_states
        self.keys, self.values = (store[:, :, :end] for store in self._store)
        return self.keys, self.values


class Slots:
    """Answers that are written together, and their cache. `begin_S[s]` is the first column that slot s may see."""

    def __init__(self, module: nn.Module, prompts: Mapping[int, Sequence[int]]):
        """Compute these prompts together and write the first token of each."""
        self.module = module
        self.device = next(module.parameters()).device
        self.started = time.perf_counter()
        self.cache = Cache(layer_class_to_replicate=Shelf)
        length = max(len(prompt) for prompt in prompts.values())
        self.begin_S = torch.tensor([length - len(prompt) for prompt in prompts.values()], device=self.device)
        padded = [[0] * (length - len(prompt)) + list(prompt) for prompt in prompts.values()]
        columns_P = torch.arange(length, device=self.device)
        logits_SV = self.module(
            input_ids=torch.tensor(padded, device=self.device),
            attention_mask=(columns_P[None] >= self.begin_S[:, None]).to(torch.int64),
            position_ids=(columns_P[None] - self.begin_S[:, None]).clamp(min=0),
            past_key_values=self.cache,
            use_cache=True,
            # An index, not 1: a slice of the last position is a view for which matmul copies the head for each slot.
            logits_to_keep=columns_P[-1:],
        ).logits[:, -1]
        first = logits_SV.argmax(-1).tolist()
        self.answers = [Completion(number, [token]) for number, token in zip(prompts, first, strict=True)]

    def step(self) -> None:
        """Write one more token in every slot."""
        logits_SV = self.forward(torch.tensor([[answer.tokens[-1]] for answer in self.answers], device=self.device))
        for answer, token in zip(self.answers, logits_SV.argmax(-1).tolist(), strict=True):
            answer.tokens.append(token)

    def forward(self, tokens_S1: Tensor) -> Tensor:
        """Return logits [S, V] after one more token in every slot."""
        length = int(self.cache.get_seq_length())
        columns_T = torch.arange(length + 1, device=self.device)
        output = self.module(
            input_ids=tokens_S1,
            attention_mask=(columns_T[None] >= self.begin_S[:, None]).to(torch.int64),
            position_ids=(length - self.begin_S)[:, None],
            past_key_values=self.cache,
            use_cache=True,
        )
        logits_SV: Tensor = output.logits[:, -1]
        return logits_SV

    def take_finished(self, ends: Collection[int], new_tokens: int) -> list[Completion]:
        """Return the answers that ended or are long enough, and give up their slots."""
        now = time.perf_counter()
        remaining, finished = [], []
        for slot, answer in enumerate(self.answers):
            answer.ended = answer.tokens[-1] in ends
            if not answer.ended and len(answer.tokens) < new_tokens:
                remaining.append(slot)
                continue
            answer.seconds = now - self.started
            answer.tokens = answer.tokens[:-1] if answer.ended else answer.tokens
            finished.append(answer)
        self.answers = [self.answers[slot] for slot in remaining]
        if finished and remaining:  # drop the columns that none of these uses
            index_S = torch.tensor(remaining, dtype=torch.int64, device=self.device)
            begin_S = self.begin_S[index_S]
            unseen = int(begin_S.min())
            self.begin_S, smaller = begin_S - unseen, Cache(layer_class_to_replicate=Shelf)
            for i, layer in enumerate(self.cache.layers):
                smaller.update(layer.keys[index_S, :, unseen:], layer.values[index_S, :, unseen:], i)
            self.cache = smaller
        return finished


@torch.no_grad()
def answer_prompts(
    module: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    ends: Collection[int],
    new_tokens: int,
    slots: int,
    cached: bool,
    on_answer: Callable[[Completion], None],
) -> None:
    """Write the likeliest token after each prompt until one of `ends` or `new_tokens`, `slots` prompts at a time.

    `cached`: what `settle_module` said; without a cache each token is a forward pass over all before it.
    """
    if not cached:
        for number, prompt in enumerate(prompts):
            on_answer(_answer_without_cache(module, number, prompt, ends, new_tokens))
        return
    order = sorted(range(len(prompts)), key=lambda i: (len(prompts[i]), i), reverse=True)
    for start in range(0, len(order), slots):
        running = Slots(module, {number: prompts[number] for number in order[start : start + slots]})
        while True:
            for answer in running.take_finished(ends, new_tokens):
                on_answer(answer)
            if not running.answers:
                break
            running.step()


@torch.no_grad()
def settle_module(module: nn.Module, prompts: Sequence[Sequence[int]]) -> bool:
    """Choose the attention for `answer_prompts`; whether this architecture can continue from keys and values alone.

    Recurrent and sliding caches can't. Both are found by comparison with a plain forward pass on two real prompts of
    different length; ask once, so that base and tuned model are answered alike.
    """
    lengths = sorted({len(prompt) for prompt in prompts})
    shortest = next(prompt for prompt in prompts if len(prompt) == lengths[0])
    longest = next(prompt for prompt in prompts if len(prompt) == lengths[-1])
    cut = max(2, min(PROBE_TOKENS, len(longest)))
    probes = [list(longest)[:cut], list(shortest)[: max(2, min(cut - 3, len(shortest)))]]
    device = next(module.parameters()).device
    expected_SV = torch.stack(
        [module(input_ids=torch.tensor([probe], device=device), use_cache=False).logits[0, -1] for probe in probes]
    ).float()

    def is_right() -> bool:
        try:
            slots = Slots(module, {number: probe[:-1] for number, probe in enumerate(probes)})
            logits_SV = slots.forward(torch.tensor([[probe[-1]] for probe in probes], device=device)).float()
        except (TypeError, ValueError, AttributeError, IndexError, RuntimeError):
            return False
        spread_S = (expected_SV - expected_SV.mean(-1, keepdim=True)).norm(dim=-1)
        # bf16 roundings alone move logits by up to 0.1 of their spread, a wrong mask or position by 1 to 2.
        return bool(((logits_SV - expected_SV).norm(dim=-1) <= 0.4 * spread_S).all())

    usual = module.config._attn_implementation
    if usual == "sdpa":
        AttentionInterface.register(_GROUPED, grouped_attention)
        AttentionMaskInterface.register(_GROUPED, sdpa_mask)
        module.set_attn_implementation(_GROUPED)
        if is_right():
            return True
        module.set_attn_implementation(usual)
    return is_right()


def _answer_without_cache(
    module: nn.Module, number: int, prompt: Sequence[int], ends: Collection[int], new_tokens: int
) -> Completion:
    started = time.perf_counter()
    answer = Completion(number)
    tokens_SP = torch.tensor([list(prompt)], device=next(module.parameters()).device)
    while len(answer.tokens) < new_tokens:
        token = module(input_ids=tokens_SP, use_cache=False).logits[0, -1].argmax()
        if int(token) in ends:
            answer.ended = True
            break
        answer.tokens.append(int(token))
        tokens_SP = torch.cat([tokens_SP, token.view(1, 1)], dim=1)
    answer.seconds = time.perf_counter() - started
    return answer


def grouped_attention(
    module: nn.Module,
    query_SHQE: Tensor,
    key_SGTE: Tensor,
    value_SGTE: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute attention of one new token of each slot, the H heads of a key-value group G as rows of one product.

    torch's SDPA takes 0.70 ms a layer for 8 queries over 90 bf16 keys on a CPU, two products 0.09 ms: a third of the
    time of a token of SmolLM2-135M. The signature is that of transformers' attention functions. Prompts go to SDPA.
    """
    slots, heads, queries, width = query_SHQE.shape
    if queries > 1:
        output, _ = sdpa_attention_forward(
            module, query_SHQE, key_SGTE, value_SGTE, attention_mask, scaling=scaling, **others
        )
        return output, None
    groups = key_SGTE.shape[1]
    query_SGRE = query_SHQE.reshape(slots, groups, heads // groups, width)
    scores_SGRT = (query_SGRE @ key_SGTE.transpose(2, 3)).float() * (width**-0.5 if scaling is None else scaling)
    if attention_mask is not None:
        scores_SGRT = scores_SGRT.masked_fill(~attention_mask, float("-inf"))
    output_SGRE = scores_SGRT.softmax(-1).to(value_SGTE.dtype) @ value_SGTE
    return output_SGRE.reshape(slots, 1, heads, width), None


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
        answers = [
            {
                "row": task.rows[part[answer.prompt]],
                "answer": tokenizer.decode(answer.tokens, skip_special_tokens=True),
                "ended": answer.ended,
                "seconds": round(answer.seconds, 6),
                "new_tokens": len(answer.tokens),
            }
            for answer in finished
        ]
        for answer in answers:
            scoring.lines.append("answer", model=name, block=block, **answer)
            scoring.heartbeat.beat(Beat.ITEM)
        turn = {"seconds": seconds, "peak_memory_bytes": memory, "probe_s": probe_s}
        scoring.lines.append("turn", model=name, block=block, **turn)
        scoring.sides[name].add_turn(turn, answers)


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
