"""The C++ kernels equal the plain forms on odd shapes, and their absence is survived and said."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from train.worker.models import documents, load_fast, write_model

from hivetune.errors import MachineNotFit
from hivetune.train.plan.layout import TrimmedDocument, make_layout
from hivetune.train.worker.model.fast import build
from hivetune.train.worker.model.fast.attention import PIECE_KEYS, NativeAttention, TorchAttention, segment_tables
from hivetune.train.worker.model.fast.backend import by_native, by_onednn, kernel_of
from hivetune.train.worker.model.fast.ops import Ops
from hivetune.train.worker.model.fast.weights import Group, Member
from hivetune.train.worker.model.memory import Workspace, mm, wide_dtype

DTYPES = [torch.float32, torch.bfloat16]
# Two roundings of bf16 (one each side), or sums of fp32 in another order.
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 1.6e-2}
each_dtype = pytest.mark.parametrize("dtype", DTYPES)


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def assert_same(a: Tensor, b: Tensor, dtype: torch.dtype) -> None:
    a, b = a.double(), b.double()
    assert float((a - b).abs().max()) <= TOLERANCE[dtype] * max(1.0, float(b.abs().max()))


def norms(ops: Ops, dtype: torch.dtype, rows: int, width: int) -> list[Tensor]:
    x, delta, w = randn(rows, width), randn(rows, width + 16, dtype=dtype)[:, :width], randn(width) + 1
    total, y, rstd = torch.empty(rows, width), torch.empty(rows, width, dtype=dtype), torch.empty(rows)
    ops.add_norm(x, delta, total, w, 1e-5, y, rstd)
    dx, again = randn(rows, width).clone(), torch.empty_like(y)
    ops.norm_backward(delta.contiguous(), total, rstd, w, dx, again)
    return [total, y, rstd, dx, again]


def gates(ops: Ops, dtype: torch.dtype, rows: int, width: int, gelu: bool) -> list[Tensor]:
    gate_up, dh = 4 * randn(rows, 2 * width + 16, dtype=dtype)[:, : 2 * width], randn(rows, width, dtype=dtype)
    h, again, d = torch.empty_like(dh), torch.empty_like(dh), torch.empty(rows, 2 * width, dtype=dtype)
    ops.glu(gate_up, h, gelu)
    ops.glu_backward(dh, gate_up, d, again, gelu)
    return [h, d, again]


def rotation_and_back(ops: Ops, dtype: torch.dtype, head_dim: int) -> list[Tensor]:
    angle = randn(5, max(1, head_dim // 2 - head_dim // 8))  # partial: the last channels stay
    x = randn(5, 3 * head_dim + 4, dtype=dtype)
    part = x[:, : 3 * head_dim]
    ops.rope(part, angle.cos(), angle.sin(), head_dim, inverse=False)
    turned = part.clone()
    ops.rope(part, angle.cos(), angle.sin(), head_dim, inverse=True)
    assert_same(x, randn(5, 3 * head_dim + 4, dtype=dtype), dtype)
    return [turned, x]


def cross_entropy(ops: Ops, dtype: torch.dtype, rows: int, vocab: int, softcap: float) -> list[Tensor]:
    target, count = torch.arange(rows) % vocab, torch.arange(rows) % 3 * 1.0
    logits, nll = 6 * randn(rows, vocab, dtype=dtype), torch.empty(rows)
    ops.cross_entropy(logits, target, count, softcap, nll, gradient=True)
    return [nll, logits]


CASES: list[tuple[Callable[..., list[Tensor]], tuple[Any, ...]]] = [
    *((norms, sizes) for sizes in [(1, 1), (3, 15), (7, 16), (5, 33), (64, 576)]),
    *((gates, (*sizes, gelu)) for sizes in [(1, 3), (9, 16), (4, 50)] for gelu in (False, True)),
    *((rotation_and_back, (head_dim,)) for head_dim in (2, 6, 16, 64, 80)),
    *((cross_entropy, (*sizes, cap)) for sizes in [(1, 2), (3, 17), (6, 1000)] for cap in (0.0, 5.0)),
]


@each_dtype
@pytest.mark.parametrize(("compute", "sizes"), CASES, ids=lambda of: getattr(of, "__name__", str(of)))
def test_work_on_rows(compute: Callable[..., list[Tensor]], sizes: tuple[Any, ...], dtype: torch.dtype) -> None:
    for found, expected in zip(compute(Ops(dtype), dtype, *sizes), compute(Ops(), dtype, *sizes), strict=True):
        assert_same(found, expected, dtype)


@each_dtype
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (7, 17), (33, 576)])
def test_dropout_bit_for_bit(rows: int, columns: int, dtype: torch.dtype) -> None:
    key_T = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=torch.Generator().manual_seed(2))
    x_TK = randn(rows, columns, dtype=dtype)
    found, expected = torch.empty_like(x_TK), torch.empty_like(x_TK)
    Ops(dtype).drop(x_TK, key_T, -5, 0.2, found)
    Ops().drop(x_TK, key_T, -5, 0.2, expected)
    assert torch.equal(found, expected)


def test_not_a_number_stays_one() -> None:
    """A step must see that something went wrong: no kernel may turn NaN into a plausible number."""
    ops = Ops(torch.float32)
    logits, nll = torch.tensor([[0.0, float("nan"), 1.0]]), torch.empty(1)
    ops.cross_entropy(logits, torch.tensor([0]), torch.ones(1), 0.0, nll, gradient=True)
    assert nll.isnan().all() and logits.isnan().any()
    x, y, rstd = torch.tensor([[1.0, float("inf")]]), torch.empty(1, 2), torch.empty(1)
    ops.add_norm(x, None, x, torch.ones(2), 1e-5, y, rstd)
    assert not y.isfinite().all()
    h = torch.empty(1, 1)
    ops.glu(torch.tensor([[float("nan"), 1.0]]), h, False)
    assert h.isnan().all()


def test_a_weight_that_is_not_a_number_reaches_loss_and_gradient(tmp_path: Path) -> None:
    model = load_fast(write_model(tmp_path), torch.float32)
    model.adapter["base_model.model.model.layers.1.self_attn.k_proj.lora_A.weight"].fill_(float("nan"))
    model.adapter["base_model.model.model.layers.1.self_attn.k_proj.lora_B.weight"].fill_(1.0)
    assert model.backward(documents(), 1.0).isnan()
    assert model.grad_N.isnan().any()


@each_dtype
@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("window", [None, 150])
def test_attention_over_many_pieces(window: int | None, softcap: float, dtype: torch.dtype) -> None:
    """Odd prefixes in prefixes, and rows of more pieces and parts than one (attention.cpp, attention.PIECE_KEYS)."""
    widths = {"heads": 2, "kv_heads": 1, "head_dim": 8, "q_width": 16, "kv_width": 8, "qkv_width": 32}
    spec: Any = SimpleNamespace(**widths, attention_scale=0.5, attention_softcap=softcap)
    prefix, middle = range(1, 538), range(1000, 1101)
    rows = ([*prefix, 7], [*prefix, *middle, *range(2000, 2500)], [*prefix, *middle, 8, 9, 10], [*range(3000, 3033)])
    documents = [TrimmedDocument(tuple(row), ((len(row) - 1, 1),)) for row in rows]
    layout = make_layout(documents, share=True)
    assert max(segment.depth + segment.size for segment in layout.segments) > PIECE_KEYS
    qkv, dout = 2 * randn(layout.size, 40, dtype=dtype), randn(layout.size, 16, dtype=dtype)
    results = []
    workspace = Workspace(torch.device("cpu"))
    for attention in (
        NativeAttention(layout, spec, dtype, workspace),
        TorchAttention(segment_tables(layout), spec, eager=True),
    ):
        out, lse = torch.empty_like(dout), torch.empty(layout.size, spec.heads)
        attention.forward(qkv, out, lse, window)
        dqkv = torch.zeros_like(qkv)
        attention.backward(dout, qkv, out, lse, dqkv, window)
        results.append((out, dqkv[:, :32]))
    for found, expected in zip(*results, strict=True):
        assert_same(found, expected, dtype)


def thin_products(
    ops: Any, rows: int, inputs: int, sizes: list[int], rank: int, given: torch.dtype, dtype: torch.dtype
) -> list[Tensor]:
    """dB and dA, then y and dy, of a matrix with an adapter for each of `sizes`, from numbers of the dtype `given`."""
    group = group_of(inputs, sizes, rank, 3, given, dtype, first=1)
    outputs, width = group.outputs, group.width
    y, dy = randn(rows, width, dtype=given).to(dtype), randn(rows, width + 2, dtype=given).to(dtype)[:, :width]
    ops.up_gradient(dy, y[:, outputs:], group, 0.5)
    ops.down_gradient(dy[:, outputs:], randn(rows, inputs, dtype=given).to(dtype), group, 0.5)
    ops.adapt(y, group, adapter=True)
    ops.adapt_backward(dy, group)
    return [*(member.d_up_NR for member in group.adapted), group.d_downs_RK, y, dy]


def group_of(
    inputs: int,
    sizes: Sequence[int],
    rank: int,
    padding: int,
    given: torch.dtype,
    dtype: torch.dtype,
    *,
    first: int = 0,
) -> Group:
    """A matrix of numbers of the dtype `given`, with an adapter for each of `sizes`; `first` columns are nobody's."""
    outputs, wide = first + sum(sizes), wide_dtype(dtype)
    d_downs_RK, members, start = torch.ones(len(sizes) * rank, inputs, dtype=wide), [], first
    for number, size in enumerate(sizes):
        one = Member(f"m{number}", start, size, number * rank)
        one.d_down_RK, one.d_up_NR = d_downs_RK[number * rank :][:rank], torch.ones(size, rank, dtype=wide)
        one.scaled_up_RN = randn(rank, size, dtype=given).to(dtype)
        members.append(one)
        start += size
    weight_NRK = randn(outputs + len(d_downs_RK) + padding, inputs, dtype=given).to(dtype) / inputs**0.5
    weight_NRK[outputs + len(d_downs_RK) :] = 0
    return Group(weight_NRK, randn(outputs, dtype=given).to(dtype), outputs, tuple(members), d_downs_RK)


@each_dtype
@pytest.mark.parametrize(
    ("rows", "inputs", "sizes", "rank"),
    [(1, 1, [1], 1), (33, 40, [24, 7, 50], 3), (70, 96, [64], 16), (600, 33, [65, 32], 33), (40, 16, [18, 3], 70)],
)
def test_thin_products(rows: int, inputs: int, sizes: list[int], rank: int, dtype: torch.dtype) -> None:
    """Against the plain forms in fp64 on the same numbers. Gradients are summed in fp32: to its rounding."""
    found = thin_products(Ops(dtype), rows, inputs, sizes, rank, dtype, dtype)
    expected = thin_products(Ops(), rows, inputs, sizes, rank, dtype, torch.float64)
    for one, other, precision in zip(found, expected, [torch.float32] * (len(sizes) + 1) + [dtype] * 2, strict=True):
        assert_same(one, other, precision)


@each_dtype
@pytest.mark.parametrize("rows", [1, 37])
def test_all_products_give_the_same(rows: int, dtype: torch.dtype) -> None:
    """As the step calls them: a weight as it lies and turned, rows that are columns of a wider buffer; an inner size of
    several parts of a panel, an odd one, and more and fewer columns than panels have."""
    for multiply in (mm, by_native, *([by_onednn] if dtype == torch.float32 else [])):
        for outputs, inputs in ((50, 24), (3, 4117), (70, 17)):
            w, x = randn(outputs, inputs, dtype=dtype), randn(rows, inputs + 36, dtype=dtype)[:, :inputs]
            out = torch.zeros(rows, outputs + 20, dtype=dtype)
            multiply(x, w.t(), out[:, :outputs])
            assert_same(out[:, :outputs], x.double() @ w.double().t(), dtype)
            assert not out[:, outputs:].any()
            dx = torch.empty(rows, inputs, dtype=dtype)
            multiply(out[:, :outputs], w, dx)
            assert_same(dx, out[:, :outputs].double() @ w.double(), dtype)


def test_our_products_do_not_depend_on_neighbours_or_threads() -> None:
    """Bit for bit: a row alone, among others, and with another number of threads."""
    x, w = randn(45, 600, dtype=torch.bfloat16), randn(70, 600, dtype=torch.bfloat16)
    all_rows, one = torch.empty(45, 70, dtype=torch.bfloat16), torch.empty(1, 70, dtype=torch.bfloat16)
    by_native(x, w.t(), all_rows)
    by_native(x[44:], w.t(), one)
    assert torch.equal(one[0], all_rows[44])
    threads, again = torch.get_num_threads(), torch.empty_like(all_rows)
    try:
        torch.set_num_threads(3)
        by_native(x, w.t(), again)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(again, all_rows)


def test_rows_that_are_not_whole_in_memory_are_refused() -> None:
    with pytest.raises(ValueError, match="not contiguous"):
        by_native(randn(4, 8).t(), randn(4, 3), torch.empty(8, 3))


@each_dtype
@pytest.mark.parametrize(("rows", "inputs", "sizes", "rank"), [(37, 70, (33, 21), 5), (9, 4100, (64, 16, 16), 8)])
def test_projecting_in_one_pass(rows: int, inputs: int, sizes: tuple[int, ...], rank: int, dtype: torch.dtype) -> None:
    """Bias and adapters in the sums of the product, members that begin within a panel."""
    group, results = group_of(inputs, sizes, rank, 32 - rank * len(sizes), dtype, dtype), []
    for ops in (Ops(dtype, multiply=by_native), Ops(dtype), Ops()):
        y = torch.full((rows, group.width), 9.0, dtype=dtype)
        ops.project(randn(rows, inputs, dtype=dtype), group, y)
        results.append(y)
    assert_same(results[0], results[2], dtype)
    assert_same(results[1], results[2], dtype)


@pytest.fixture
def fresh_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """As on a machine where nothing was compiled yet."""
    folder = tmp_path / "fresh-kernels"
    monkeypatch.setenv("HIVETUNE_KERNELS", str(folder))
    build.library.cache_clear()
    kernel_of.cache_clear()
    yield folder
    build.library.cache_clear()
    kernel_of.cache_clear()


@pytest.mark.parametrize("compiler", ["false", "/nowhere/g++"])
def test_without_a_compiler_the_plain_forms_run_and_say_so(
    compiler: str, fresh_build: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", compiler)
    model = load_fast(write_model(tmp_path / "model"), torch.float32)
    assert model.kernels.startswith("torch (") and compiler in model.kernels
    assert float(model.backward(documents(), 1.0)) > 0
    with pytest.raises(MachineNotFit, match="CPU kernels of this run are not available now"):
        load_fast(tmp_path / "model", torch.float32, kernels="native")


def test_a_library_that_is_there_needs_no_compiler(
    fresh_build: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiler was asked for its version each time, and without one the run took other kernels."""
    fresh_build.mkdir()
    (fresh_build / f"{build._fingerprint(build.FLAGS)}.so").touch()
    monkeypatch.setattr(build, "_compile", lambda command, path: pytest.fail("compiled"))
    monkeypatch.setattr(build.ctypes, "CDLL", lambda path: path)
    for compiler in (None, "/nowhere/g++"):
        monkeypatch.setattr(build.shutil, "which", lambda name: None)
        monkeypatch.setenv("CXX", compiler) if compiler else monkeypatch.delenv("CXX", raising=False)
        build.library.cache_clear()
        assert Path(str(build.library("float32"))).parent == fresh_build


@pytest.mark.usefixtures("fresh_build")
def test_a_disk_that_runs_no_programs_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> None:
        raise OSError(f"{path}: failed to map segment from shared object")

    folder = write_model(tmp_path / "model")
    monkeypatch.setattr(build, "_compile", lambda command, path: None)
    monkeypatch.setattr(build.ctypes, "CDLL", refuse)
    assert "failed to map segment" in build.missing_kernels_reason()
    with pytest.raises(MachineNotFit, match="failed to map segment") as caught:
        load_fast(folder, torch.float32, kernels="native")
    assert "HIVETUNE_KERNELS" in caught.value.hint
