"""Greedy answers to many prompts at once: a fixed number of slots, each taking the next prompt when its answer ends.

All slots end at the same column of the key-value cache and begin where their prompt begins; what lies before is
masked. So a new prompt is computed alone and put in at the right end, and no slot waits for the longest answer.

Shapes: S slots, T cached positions, P positions of a prompt, V vocabulary.
"""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache


@dataclass
class Answer:
    """Tokens after the prompt, without the one that ended it. `seconds`: from taking the prompt to the last token."""

    prompt: int
    tokens: list[int] = field(default_factory=list)
    ended: bool = False
    seconds: float = 0.0


class Slots:
    """The answers being written and their cache. `begin_S[s]` is the first column that slot s may see."""

    def __init__(self, module: nn.Module):
        self.module = module
        self.device = next(module.parameters()).device
        self.cache = DynamicCache()
        self.answers: list[Answer] = []
        self.started: list[float] = []
        self.begin_S = torch.zeros(0, dtype=torch.int64, device=self.device)

    @property
    def length(self) -> int:
        return int(self.cache.get_seq_length())

    def add(self, number: int, prompt: Sequence[int]) -> None:
        """Compute one prompt and write its first token."""
        started = time.perf_counter()
        own = DynamicCache()
        tokens_SP = torch.tensor([list(prompt)], device=self.device)
        logits_V = self.module(input_ids=tokens_SP, past_key_values=own, use_cache=True, logits_to_keep=1).logits[0, -1]
        self.answers.append(Answer(number, [int(logits_V.argmax())]))
        self.started.append(started)
        length = max(self.length, len(prompt)) if len(self.answers) > 1 else len(prompt)
        shift = length - self.length if len(self.answers) > 1 else 0
        self.begin_S = torch.cat([self.begin_S + shift, self.begin_S.new_tensor([length - len(prompt)])])
        merged = DynamicCache()
        for i, new in enumerate(own.layers):
            pairs = []
            for kind in ("keys", "values"):
                parts = [] if len(self.answers) == 1 else [_pad_left(getattr(self.cache.layers[i], kind), length)]
                pairs.append(torch.cat([*parts, _pad_left(getattr(new, kind), length)]))
            merged.update(pairs[0], pairs[1], i)
        self.cache = merged

    def step(self) -> None:
        """One more token in every slot."""
        tokens_S1 = torch.tensor([[answer.tokens[-1]] for answer in self.answers], device=self.device)
        columns_T = torch.arange(self.length + 1, device=self.device)
        logits_SV = self.module(
            input_ids=tokens_S1,
            attention_mask=(columns_T[None] >= self.begin_S[:, None]).to(torch.int64),
            position_ids=(self.length - self.begin_S)[:, None],
            past_key_values=self.cache,
            use_cache=True,
        ).logits[:, -1]
        for answer, token in zip(self.answers, logits_SV.argmax(-1).tolist(), strict=True):
            answer.tokens.append(token)

    def take_finished(self, ends: Collection[int], new_tokens: int) -> list[Answer]:
        """The answers that ended or are long enough; their slots are given up."""
        now = time.perf_counter()
        kept, finished = [], []
        for slot, answer in enumerate(self.answers):
            answer.ended = answer.tokens[-1] in ends
            if not answer.ended and len(answer.tokens) < new_tokens:
                kept.append(slot)
                continue
            answer.seconds = now - self.started[slot]
            answer.tokens = answer.tokens[:-1] if answer.ended else answer.tokens
            finished.append(answer)
        if finished:
            self._keep(kept)
        return finished

    def _keep(self, kept: list[int]) -> None:
        """Only these slots, without the columns that none of them sees."""
        self.answers = [self.answers[slot] for slot in kept]
        self.started = [self.started[slot] for slot in kept]
        index_S = torch.tensor(kept, dtype=torch.int64, device=self.device)
        self.begin_S = self.begin_S[index_S]
        if not kept:
            self.cache = DynamicCache()
            return
        unseen = int(self.begin_S.min())
        self.begin_S = self.begin_S - unseen
        smaller = DynamicCache()
        for i, layer in enumerate(self.cache.layers):
            smaller.update(layer.keys[index_S, :, unseen:], layer.values[index_S, :, unseen:], i)
        self.cache = smaller


@torch.no_grad()
def answer_prompts(
    module: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    ends: Collection[int],
    new_tokens: int,
    slots: int,
    on_answer: Callable[[Answer], None],
) -> None:
    """Write the likeliest token after each prompt until one of `ends` or `new_tokens`; each answer when it is done."""
    if not cache_is_exact(module):
        for number, prompt in enumerate(prompts):
            on_answer(_answer_without_cache(module, number, prompt, ends, new_tokens))
        return
    waiting = sorted(range(len(prompts)), key=lambda i: (len(prompts[i]), i))
    running = Slots(module)
    while waiting or running.answers:
        while waiting and len(running.answers) < slots:
            number = waiting.pop()  # the longest first: later ones fit below it
            running.add(number, prompts[number])
        for answer in running.take_finished(ends, new_tokens):
            on_answer(answer)
        if running.answers and not (waiting and len(running.answers) < slots):
            running.step()
            for answer in running.take_finished(ends, new_tokens):
                on_answer(answer)


@torch.no_grad()
def cache_is_exact(module: nn.Module) -> bool:
    """Whether this architecture can be continued from keys and values alone, prompts of two lengths side by side.

    Recurrent and sliding caches can't; what they would answer is compared with a plain forward pass.
    """
    slots = Slots(module)
    prompts = [list(range(1, 9)), list(range(3, 7))]
    try:
        for number, prompt in enumerate(prompts):
            slots.add(number, prompt)
            slots.answers[-1].tokens[-1] = 2
        tokens_S1 = torch.full((2, 1), 2, device=slots.device)
        columns_T = torch.arange(slots.length + 1, device=slots.device)
        cached_SV = module(
            input_ids=tokens_S1,
            attention_mask=(columns_T[None] >= slots.begin_S[:, None]).to(torch.int64),
            position_ids=(slots.length - slots.begin_S)[:, None],
            past_key_values=slots.cache,
            use_cache=True,
        ).logits[:, -1]
    except (TypeError, ValueError, AttributeError, IndexError, RuntimeError):
        return False
    plain = [module(input_ids=torch.tensor([[*p, 2]], device=slots.device), use_cache=False) for p in prompts]
    plain_SV = torch.stack([output.logits[0, -1] for output in plain])
    # Half precision rounds each layer's output to 3 digits; a wrong position or mask moves logits by tenths of them.
    return bool((cached_SV - plain_SV).abs().max() <= 0.05 * plain_SV.abs().max())


def _answer_without_cache(
    module: nn.Module, number: int, prompt: Sequence[int], ends: Collection[int], new_tokens: int
) -> Answer:
    started = time.perf_counter()
    answer = Answer(number)
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


def _pad_left(kept: Tensor, length: int) -> Tensor:
    """[slots, heads, positions, width] with zeros before, up to `length` positions."""
    return F.pad(kept, (0, 0, length - kept.shape[2], 0))
