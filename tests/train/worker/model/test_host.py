"""A step without the host: once its rows are laid out, nothing asks the device for a number, copies from it, makes a
shape out of what was computed, or takes new memory after the first time. Checked on a CPU, with the kernels that cards
use; what a card's driver does besides is not seen here."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import require_module
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from train.worker.models import write_model

from hivetune.config import LoraConfig
from hivetune.run.choices import Choices
from hivetune.train.worker.loop import Updater
from hivetune.train.worker.model.adapter import initialise
from hivetune.train.worker.model.fast.graphs import USES_BEFORE
from hivetune.train.worker.model.fast.model import FastModel
from hivetune.train.worker.model.protocol import Document
from hivetune.train.worker.optimizer import AdamW

# What makes the host wait, by name: of tensors' methods, and of the operations below them.
WAITING = {
    *("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "__iter__", "__contains__"),
    *("nonzero", "argwhere", "masked_select", "unique", "equal", "allclose", "is_nonzero", "pin_memory"),
}
WAITING_OPERATIONS = {"_local_scalar_dense", "nonzero", "masked_select", "unique", "_unique2", "equal", "is_nonzero"}
MASKED = {"index", "index_put", "index_put_", "_index_put_impl_"}


class HostAsked(AssertionError):
    """What the step did, and with what."""


class NoWaitingMethod(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in WAITING:
            raise HostAsked(name)
        return func(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    """Refuses what waits, and keeps (operation, shapes and dtypes of its tensors) of all others; and of those that
    answer in memory of their own, how many bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, ...]] = []
        self.fresh: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in WAITING_OPERATIONS:
            raise HostAsked(name)
        if name in MASKED and any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1]):
            raise HostAsked(f"{name} by a mask")
        flat = torch.utils._pytree.tree_leaves((args, kwargs or {}))
        self.seen.append((name, *((tuple(t.shape), t.dtype) for t in flat if isinstance(t, torch.Tensor))))
        answer = func(*args, **(kwargs or {}))
        known = {place for place, _ in memory(flat)}
        fresh = [(place, size) for place, size in memory(torch.utils._pytree.tree_leaves(answer)) if place not in known]
        self.fresh += sorted((name, size) for _, size in fresh)
        return answer


def memory(tensors: list[Any]) -> set[tuple[int, int]]:
    """Addresses and sizes of what tensors lie in."""
    storages = [tensor.untyped_storage() for tensor in tensors if isinstance(tensor, torch.Tensor)]
    return {(storage.data_ptr(), storage.nbytes()) for storage in storages}


def rows(seed: int) -> list[Document]:
    """Rows of the same lengths and prefixes whatever the seed, of other tokens."""
    generator = torch.Generator().manual_seed(seed)
    prefix = torch.randint(3, 90, (24,), generator=generator)
    found = []
    for row, size in enumerate((9, 17, 30, 12)):
        own = torch.cat([torch.tensor([row + 3]), torch.randint(3, 90, (size,), generator=generator)])
        tokens_L = torch.cat([prefix, own]) if row < 3 else own
        trained_L = torch.zeros(len(tokens_L), dtype=torch.bool)
        trained_L[-6:] = True
        found.append(Document(row, tokens_L, trained_L))
    return found


class Step:
    """A model as it runs on a card, its optimizer, and one step at a time under both modes."""

    def __init__(self, folder: Path, family: str, dtype: torch.dtype, **choices: Any):
        write_model(folder, family, **({"num_hidden_layers": 1} if choices.get("kernels") == "triton" else {}))
        chosen = Choices(**{"kernels": "torch", "token_multiple": 64, **choices})
        self.model = FastModel(folder, LoraConfig(r=4), dtype=dtype, device=torch.device("cpu"), choices=chosen)
        initialise(self.model.adapter, 0)
        optimizer = AdamW(self.model.master_N, weight_decay=0.01)
        self.updater, self.number = Updater(self.model.grad_N, optimizer, clip=1.0), 0

    def __call__(self, seed: int) -> Operations:
        """One step: what it brings to the device comes before, as a card's host brings it while the step before runs.
        Where work is replayed, that it copies its tables is part of the step."""
        tables = list(self.model.lay_out(rows(seed)))
        self.number += 1
        self.updater.begin(rate=1e-3, number=self.number, trained_tokens=24)
        with NoWaitingMethod(), Operations() as operations:
            self.model.grad_N.zero_()
            loss = self.model.compute(tables, 1e-2)
            self.updater.apply(loss[None])
        return operations


@pytest.mark.parametrize(
    ("family", "dtype", "choices"),
    [
        *((family, torch.float32, {}) for family in ("llama", "qwen3", "gemma2")),
        *(("llama", torch.float32, choices) for choices in ({"recompute": 2}, {"attention": "eager"})),
        ("llama", torch.bfloat16, {"budget_tokens": 64}),
        *((family, torch.float32, {"graphs": True}) for family in ("llama", "gemma2")),
    ],
)
def test_a_step_never_asks_the_device(tmp_path: Path, family: str, dtype: torch.dtype, choices: dict) -> None:
    """The plain kernels take temporaries, but the same ones in each step: a card's allocator, or a graph's pool, has
    them ready."""
    step = Step(tmp_path, family, dtype, **choices)
    first = step(1)
    for _ in range(USES_BEFORE if "graphs" in choices else 0):
        step(1)
    moves = step.model._workspace.moves
    again, other = step(1), step(2)
    assert len(first.seen) > 100
    assert again.seen == other.seen, "the operations or their shapes depend on the tokens"
    assert again.fresh == other.fresh, "memory is taken that the step before did not take"
    assert step.model._workspace.moves == moves, "a buffer grew after the first step"
    assert step.model.graphs == (1 if "graphs" in choices else None)


@pytest.mark.parametrize("family", ["llama", pytest.param("gemma2", marks=pytest.mark.proof)])
def test_the_kernels_for_cards_take_no_new_memory(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the sum that a step returns. What the interpreter does is left out: a card has none."""
    require_module("triton", "card")
    from triton.runtime.interpreter import GridExecutor

    launch = GridExecutor.__call__

    def unseen(*given: Any, **named: Any) -> Any:
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            return launch(*given, **named)

    monkeypatch.setattr(GridExecutor, "__call__", unseen)
    step = Step(tmp_path, family, torch.float32, kernels="triton", graphs=True)
    step(1)
    assert step(2).fresh == [("clone", 4)]


def test_the_gradient_is_what_backward_gives(tmp_path: Path) -> None:
    """Prepared or not: the same bits, so that what is checked here is what trains."""
    step = Step(tmp_path, "llama", torch.float32)
    digests = []
    for run in (
        lambda: step.model.compute(list(step.model.lay_out(rows(1))), 1e-2),
        lambda: step.model.backward(rows(1), 1e-2),
    ):
        step.model.grad_N.zero_()
        loss = run()
        digests.append((float(loss), hashlib.sha256(step.model.grad_N.numpy().tobytes()).hexdigest()))
    assert digests[0] == digests[1]


@pytest.mark.parametrize(
    ("name", "work"),
    [
        ("item", lambda x: x.sum().item()),
        ("tolist", lambda x: x.tolist()),
        ("__float__", lambda x: float(x.sum())),
        ("__bool__", lambda x: bool(x.sum() > 0)),
        ("cpu", lambda x: x.cpu()),
        ("nonzero", lambda x: x.nonzero()),
        ("index by a mask", lambda x: torch.ops.aten.index(x, [x > 0])),
        ("_local_scalar_dense", lambda x: torch.ops.aten._local_scalar_dense(x.sum())),
    ],
)
def test_what_waits_is_refused(name: str, work: Callable[[torch.Tensor], object]) -> None:
    with pytest.raises(HostAsked, match=name), NoWaitingMethod(), Operations():
        work(torch.randn(4))
