"""Every rung of the ladder acts: what it changes in a worker on each path, and that loss and gradients stay."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from process.tiny_child import Play
from torch.utils._python_dispatch import TorchDispatchMode
from train.worker.models import documents, gradients, load_any, worst_difference, write_model

from hivetune.config import LoraConfig, parse_config
from hivetune.process.parent import run_task
from hivetune.run.choices import Choices
from hivetune.train.supervise.ladder import RUNGS, effects_of, void_rungs
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


class Called(TorchDispatchMode):
    """The operations of torch that were called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))

    @property
    def products(self) -> int:
        return sum(name in ("mm", "addmm", "addmm_") for name in self.names)

    @property
    def fused_attention(self) -> bool:
        return any("scaled_dot_product" in name for name in self.names)


@dataclass(frozen=True)
class Step:
    """One step as a worker makes it."""

    model: LoraModel
    called: Called
    loss: float
    gradients: dict[str, torch.Tensor]

    @property
    def sizes(self) -> list[int]:
        """Return the number of documents in each micro-batch, those without a trained token left out."""
        return [len(batch) for batch in self.model.micro_batches(documents())]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), max_position_embeddings=1024)


def backward(folder: Path, choices: Choices) -> Step:
    """One step with these choices."""
    model = load_any(folder, DTYPES[choices.dtype or ""], LORA, choices)
    for name, view in model.adapter.items():  # the paths hold them in different orders
        torch.manual_seed(zlib.crc32(name.encode()))
        view.copy_(torch.randn(view.shape, dtype=torch.float64) * 0.1)
    with Called() as called:
        loss = float(model.backward(documents(), 1 / 37))
    return Step(model, called, loss, {name: grad.double() for name, grad in gradients(model).items()})


def is_smaller(before: Step, after: Step) -> bool:
    return max(after.sizes) < max(before.sizes) and after.called.products > before.called.products


# What is seen of each rung in a step.
IN_A_STEP: dict[str, Callable[[Step, Step], bool]] = {
    "plain": lambda before, after: (
        before.called.fused_attention and not after.called.fused_attention and "_softmax" in after.called.names
    ),
    "float32": lambda before, after: (before.model.dtype, after.model.dtype) == (torch.float64, torch.float32),
    "small": is_smaller,
    "smallest": lambda before, after: is_smaller(before, after) and set(after.sizes) == {1},
    "general": lambda before, after: after.model.path == "general",
}
# And of those that are about the process around it.
IN_PROCESS = {"blas", "environment", "cpu"}
OF_THE_TRAINING = {"rank", "sample"}  # they change the run folder: test_supervisor.py


def test_every_rung_is_looked_at() -> None:
    assert IN_A_STEP.keys() | IN_PROCESS | OF_THE_TRAINING == RUNGS.keys()


@pytest.mark.parametrize("path", ["fast", "general"])
@pytest.mark.parametrize("rung", IN_A_STEP)
def test_a_rung_changes_the_step_and_not_its_result(folder: Path, rung: str, path: str) -> None:
    settled = replace(SETTLED, path=path)
    before, after = backward(folder, settled), backward(folder, changed(settled, rung))
    if rung in void_rungs({}, settled):
        assert (rung, path) == ("general", "general")
        return
    assert before.model.path == path and IN_A_STEP[rung](before, after)
    same = SAME_IN_FP32 if (rung, path) in IN_FP32 else SAME
    assert after.loss == pytest.approx(before.loss, rel=same)
    assert worst_difference(after.gradients, before.gradients) < same


def test_the_smallest_step_forms_its_layers_again(folder: Path) -> None:
    for path in ("fast", "general"):
        settled = replace(SETTLED, path=path)
        alone = backward(folder, replace(settled, halvings=30)).called.products
        assert backward(folder, changed(settled, "smallest")).called.products > alone


def test_the_compiled_kernels_are_left_too(folder: Path) -> None:
    """Native kernels run in fp32 and bf16: plain attention must reach them as well."""
    settled = Choices(device="cpu", dtype="float32", threads=1)
    before, plain = backward(folder, settled), backward(folder, changed(settled, "plain"))
    assert (before.model.kernels, plain.model.kernels) == ("native", "torch")
    assert "_softmax" not in before.called.names and "_softmax" in plain.called.names
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
    assert changed(Choices(device="cuda", dtype="bfloat16", threads=1), "cpu").device == "cpu"


def test_a_rung_that_changes_nothing_is_void() -> None:
    settled = Choices(dtype="float32", path="general", threads=1)
    assert void_rungs({}, settled) == {"float32", "general"}
    assert void_rungs({}, replace(settled, halvings=3)) == {"float32", "general", "small"}
    of_a_card = {"HSA_ENABLE_SDMA": "0", "HSA_ENABLE_INTERRUPT": "0", "PYTORCH_NO_HIP_MEMORY_CACHING": "1"}
    assert "environment" in void_rungs(of_a_card, settled)
    assert "environment" not in void_rungs({**of_a_card, "HSA_OVERRIDE_GFX_VERSION": "10.3.0"}, settled)


def changed(settled: Choices, rung: str) -> Choices:
    return with_recovery_changes(CONFIG, settled, effects_of((rung,))[1])
