"""Every rung of the ladder acts: what it changes in a worker on each path, and that loss and gradients stay."""

import os
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from process.tiny_child import Play
from torch.utils._python_dispatch import TorchDispatchMode
from train.worker.models import documents, random_adapter, write_model

from hivetune.config import LoraConfig, parse_config
from hivetune.process.parent import run_task
from hivetune.run.choices import Choices
from hivetune.train.supervise.ladder import RUNGS, effects_of, void_rungs
from hivetune.train.worker.device import DTYPES, start_with, with_changes
from hivetune.train.worker.model.adapter import same_views
from hivetune.train.worker.model.load import load_model
from hivetune.train.worker.model.protocol import LoraModel

CONFIG = parse_config({"model": "none", "data": {"path": "none"}}, "test")
LORA = LoraConfig(r=5, alpha=15)  # no multiple of anything
SETTLED = Choices(device="cpu", dtype="float64", threads=1, kernels="torch")  # nothing is compiled
# In fp64, sums in another order; what is computed wrongly is many orders larger.
SAME, SAME_IN_FP32 = 1e-10, 1e-5
# transformers forms norms, and the softmax of eager attention, in fp32 whatever the dtype.
IN_FP32 = {("dtype", "fast"), ("dtype", "general"), ("general", "fast"), ("attention", "general")}
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


def few_token_counts(before: Trace, after: Trace) -> bool:
    return all(side % 256 for side in tokens(before)) and not any(side % 256 for side in tokens(after))


def no_thin_products(before: Trace, after: Trace) -> bool:
    return LORA.r in before.sides and LORA.r not in after.sides and 64 in after.sides and min(after.sides) >= 16


def smaller(before: Trace, after: Trace) -> bool:
    return max(tokens(after)) < max(tokens(before)) and len(after.products) > len(before.products)


def one_document_and_again(before: Trace, after: Trace) -> bool:
    longest = max(len(document.tokens_L) for document in documents())
    return max(tokens(after)) <= longest and smaller(before, after)


# What is seen of each rung in the products of a step.
IN_PRODUCTS: dict[str, Callable[[Trace, Trace], bool]] = {
    "attention": no_fused_attention,
    "bucket": few_token_counts,
    "rank64": no_thin_products,
    "dtype": lambda before, after: (before.dtypes, after.dtypes) == ({torch.float64}, {torch.float32}),
    "micro": smaller,
    "small": smaller,
    "smallest": one_document_and_again,
    "general": lambda before, after: after.path == "general",
}
# And of those that are about the process around it.
IN_PROCESS = {"blas", "allocator", "no-cache", "threads", "isa", "sdma-off", "interrupt", "no-override", "cpu"}
OF_A_CARD = {"kernels", "graphs"}  # tests/train/worker/model/test_triton.py, test_replay.py
OF_THE_WEIGHTS = {"stream"}  # tests/train/worker/model/test_streaming.py: no product changes
OF_THE_TRAINING = {"rank", "sample"}  # they change the run folder: test_supervisor.py


def test_every_rung_is_looked_at() -> None:
    assert IN_PRODUCTS.keys() | IN_PROCESS | OF_A_CARD | OF_THE_WEIGHTS | OF_THE_TRAINING == RUNGS.keys()


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


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_padded_rank_leaves_masters_alone(folder: Path, dropout: float) -> None:
    """With dropout too, where each module has a product of its own; the same draws give the same gradients."""
    found = []
    for multiple in (1, 64):
        choices = replace(SETTLED, rank_multiple=multiple)
        lora = LORA.model_copy(update={"dropout": dropout})
        model = load_model(
            folder, lora, method="lora", dtype=torch.float64, device=torch.device("cpu"), choices=choices
        )
        random_adapter(model)
        torch.manual_seed(1)
        model.backward(documents(), 1 / 37)
        found.append((model.master_N, model.grad_N))
    assert torch.equal(found[0][0], found[1][0])
    assert float((found[0][1] - found[1][1]).norm() / found[0][1].norm()) < SAME


@pytest.mark.slow
def test_the_compiled_kernels_are_left_too(folder: Path) -> None:
    """Native kernels run in fp32 and bf16: plain attention and other instructions must reach them as well."""
    settled = Choices(device="cpu", dtype="float32", threads=1)
    before = backward(folder, settled)
    attention, isa = (backward(folder, changed(settled, rung)) for rung in ("attention", "isa"))
    assert before.kernels == attention.kernels == "native" and isa.kernels == "torch"
    assert "_softmax" not in before.called and "_softmax" in attention.called
    for after in (attention, isa):
        assert after.loss == pytest.approx(before.loss, rel=SAME_IN_FP32)


@pytest.mark.parametrize("rung", sorted(IN_PROCESS))
def test_a_rung_reaches_the_process(rung: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment, _ = effects_of((rung,))
    for name in environment:
        monkeypatch.setenv(name, "as it was")
    outcome = run_task(Play("environment"), tmp_path, module=TINY, environment=environment)
    found = outcome.result["environment"]
    assert environment and {name: found.get(name) for name in environment} == environment


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_one_thread_wins_over_what_was_settled(two_threads: None) -> None:
    start_with(changed(replace(SETTLED, threads=2), "threads"))
    assert torch.get_num_threads() == 1


def test_the_processor_instead_of_the_card() -> None:
    found = changed(Choices(device="cuda", dtype="bfloat16", threads=1), "cpu")
    assert found.device == "cpu"


@pytest.mark.slow
@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX512", reason="needs a processor with AVX-512")
def test_torch_takes_other_instructions() -> None:
    code = "import torch; print(torch.backends.cpu.get_cpu_capability())"
    environment = {**os.environ, **{name: str(value) for name, value in effects_of(("isa",))[0].items()}}
    told = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "AVX2"


def test_a_rung_that_changes_nothing_is_void() -> None:
    settled = Choices(dtype="float32", path="general", threads=1, rank_multiple=64)
    void = {"graphs", "dtype", "general", "rank64", "allocator", "no-override", "stream"}
    assert void_rungs({}, settled) == void and void_rungs({}, replace(settled, graphs=False)) == void
    assert "graphs" not in void_rungs({}, replace(settled, graphs=True, path="fast"))
    assert void_rungs({"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}, settled) == void | {"threads"}
    assert "no-override" not in void_rungs({"HSA_OVERRIDE_GFX_VERSION": "10.3.0"}, settled)


def changed(settled: Choices, rung: str) -> Choices:
    return with_changes(CONFIG, settled, effects_of((rung,))[1])
