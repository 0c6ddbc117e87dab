"""Every rung of the ladder acts: what it changes in a worker on each path, and that loss and gradients stay."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from process.tiny_child import Play
from torch.utils._python_dispatch import TorchDispatchMode
from train.worker.models import documents, write_model

from hivetune.config import LoraConfig, parse_config
from hivetune.process.parent import run_task
from hivetune.run.choices import Choices
from hivetune.train.supervise.ladder import RUNGS, effects_of, void_rungs
from hivetune.train.worker.model.adapter import same_views
from hivetune.train.worker.model.load import load_model
from hivetune.train.worker.model.protocol import LoraModel
from hivetune.train.worker.settle import DTYPES, with_recovery_changes

pytestmark = pytest.mark.slow

CONFIG = parse_config({"model": "none", "data": {"path": "none"}}, "test")
LORA = LoraConfig(r=5, alpha=15)  # no multiple of anything
SETTLED = Choices(device="cpu", dtype="float64", threads=1, kernels="torch")  # nothing is compiled
# In fp64, sums in another order; what is computed wrongly is many orders larger.
SAME, SAME_IN_FP32 = 1e-10, 1e-5
# transformers forms norms, and the softmax of eager attention, in fp32 whatever the dtype.
IN_FP32 = {("float32", "fast"), ("float32", "general"), ("general", "fast"), ("plain", "general")}
TINY = str(Path(__file__).parents[2] / "process" / "tiny_child.py")


@dataclass
class Trace(TorchDispatchMode):
    """What one backward pass called."""

    path: str = ""
    kernels: str = ""
    products: list[tuple[tuple[int, ...], ...]] = field(default_factory=list)
    dtypes: set[torch.dtype] = field(default_factory=set)
    called: set[str] = field(default_factory=set)
    model_sides: set[int] = field(default_factory=set)
    loss: float = 0.0
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        self.called.add(name)
        if name in ("mm", "addmm", "addmm_"):
            matrices = [value for value in args if isinstance(value, torch.Tensor)][-2:]
            self.products.append(tuple(tuple(matrix.shape) for matrix in matrices))
            self.dtypes |= {matrix.dtype for matrix in matrices}
        return function(*args, **(kwargs or {}))

    @property
    def sides(self) -> set[int]:
        """Every side of every product."""
        return {side for product in self.products for shape in product for side in shape}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), max_position_embeddings=1024)


def backward(folder: Path, choices: Choices, seed: int = 0) -> Trace:
    """One step as a worker with these choices makes it."""
    model: LoraModel = load_model(
        folder, LORA, method="lora", dtype=DTYPES[choices.dtype or ""], device=torch.device("cpu"), choices=choices
    )
    for name, view in model.adapter.items():  # the paths hold them in different orders
        torch.manual_seed(zlib.crc32(name.encode()))
        view.copy_(torch.randn(view.shape, dtype=torch.float64) * 0.1)
    trace = Trace(path=model.path, kernels=getattr(model, "kernels", ""))
    with trace:
        trace.loss = float(model.backward(documents(seed, prefix=20 + seed), 1 / 37))
    trace.gradients = {name: view.double() for name, view in same_views(model.grad_N, model.adapter).items()}
    return trace


def tokens(trace: Trace) -> set[int]:
    """Sides of products that are no side of the model."""
    return trace.sides - trace.model_sides


def no_fused_attention(before: Trace, after: Trace) -> bool:
    def fused(trace: Trace) -> bool:
        return any("scaled_dot_product" in name for name in trace.called)

    return fused(before) and not fused(after) and "_softmax" in after.called


def smaller(before: Trace, after: Trace) -> bool:
    return max(tokens(after)) < max(tokens(before)) and len(after.products) > len(before.products)


def one_document_and_again(before: Trace, after: Trace) -> bool:
    longest = max(len(document.tokens_L) for document in documents())
    return max(tokens(after)) <= longest and smaller(before, after)


# What is seen of each rung in the products of a step.
IN_PRODUCTS: dict[str, Callable[[Trace, Trace], bool]] = {
    "plain": no_fused_attention,
    "float32": lambda before, after: (before.dtypes, after.dtypes) == ({torch.float64}, {torch.float32}),
    "small": smaller,
    "smallest": one_document_and_again,
    "general": lambda before, after: after.path == "general",
}
# And of those that are about the process around it.
IN_PROCESS = {"blas", "environment", "cpu"}
OF_THE_TRAINING = {"rank", "sample"}  # they change the run folder: test_supervisor.py


def test_every_rung_is_looked_at() -> None:
    assert IN_PRODUCTS.keys() | IN_PROCESS | OF_THE_TRAINING == RUNGS.keys()


@pytest.mark.parametrize("path", ["fast", "general"])
@pytest.mark.parametrize("rung", IN_PRODUCTS)
def test_a_rung_changes_the_step_and_not_its_result(folder: Path, rung: str, path: str) -> None:
    settled = replace(SETTLED, path=path)
    before, after = backward(folder, settled), backward(folder, changed(settled, rung))
    # What stays the same with other documents is the model's.
    before.model_sides = after.model_sides = before.sides & backward(folder, settled, seed=1).sides
    if rung in void_rungs({}, settled):
        assert (rung, path) == ("general", "general")
        return
    assert before.path == path and IN_PRODUCTS[rung](before, after)
    same = SAME_IN_FP32 if (rung, path) in IN_FP32 else SAME
    assert after.loss == pytest.approx(before.loss, rel=same)
    for name, gradient in before.gradients.items():
        assert float((after.gradients[name] - gradient).norm() / gradient.norm()) < same


def test_the_smallest_step_forms_its_layers_again(folder: Path) -> None:
    for path in ("fast", "general"):
        settled = replace(SETTLED, path=path)
        alone = len(backward(folder, replace(settled, halvings=30)).products)
        assert len(backward(folder, changed(settled, "smallest")).products) > alone


@pytest.mark.slow
def test_the_compiled_kernels_are_left_too(folder: Path) -> None:
    """Native kernels run in fp32 and bf16: plain attention must reach them as well."""
    settled = Choices(device="cpu", dtype="float32", threads=1)
    before, plain = backward(folder, settled), backward(folder, changed(settled, "plain"))
    assert (before.kernels, plain.kernels) == ("native", "torch")
    assert "_softmax" not in before.called and "_softmax" in plain.called
    assert plain.loss == pytest.approx(before.loss, rel=SAME_IN_FP32)


@pytest.mark.parametrize("rung", sorted(IN_PROCESS))
def test_a_rung_reaches_the_process(rung: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment, _ = effects_of((rung,))
    for name in environment:
        monkeypatch.setenv(name, "as it was")
    outcome = run_task(Play("environment"), tmp_path, module=TINY, environment=environment)
    found = outcome.result["environment"]
    assert environment and {name: found.get(name) for name in environment} == environment


def test_the_processor_instead_of_the_card() -> None:
    found = changed(Choices(device="cuda", dtype="bfloat16", threads=1), "cpu")
    assert found.device == "cpu"


def test_a_rung_that_changes_nothing_is_void() -> None:
    settled = Choices(dtype="float32", path="general", threads=1)
    assert void_rungs({}, settled) == {"float32", "general"}
    assert void_rungs({}, replace(settled, halvings=3)) == {"float32", "general", "small"}
    of_a_card = {"HSA_ENABLE_SDMA": "0", "HSA_ENABLE_INTERRUPT": "0", "PYTORCH_NO_HIP_MEMORY_CACHING": "1"}
    assert "environment" in void_rungs(of_a_card, settled)
    assert "environment" not in void_rungs({**of_a_card, "HSA_OVERRIDE_GFX_VERSION": "10.3.0"}, settled)


def changed(settled: Choices, rung: str) -> Choices:
    return with_recovery_changes(CONFIG, settled, effects_of((rung,))[1])
