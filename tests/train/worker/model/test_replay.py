"""Work that comes often is replayed on the same memory: the same bits as when it is not, whatever came before.

The plain kernels on a processor record nothing; the same work is done on the same memory, which is all of a graph but
the card's part of it. No card has run that part. The native kernels' calls are kept and made again.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from train.worker.models import random_adapter, write_model

from hivetune.config import LoraConfig
from hivetune.run.choices import Choices
from hivetune.train.worker.model.fast import passes
from hivetune.train.worker.model.fast.graphs import Replay
from hivetune.train.worker.model.fast.kernels.calls import Calls
from hivetune.train.worker.model.fast.model import FastModel
from hivetune.train.worker.model.fast.tables import classes_of, few_of
from hivetune.train.worker.model.memory import Workspace
from hivetune.train.worker.model.protocol import Document

CPU = torch.device("cpu")


def rows(seed: int, sizes: Sequence[int] = (9, 17, 30, 12), prefix: int = 24) -> list[Document]:
    """Rows behind a common prefix, the last one without it."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randint(3, 90, (prefix,), generator=generator)
    found = []
    for row, size in enumerate(sizes):
        own = torch.cat([torch.tensor([row + 3]), torch.randint(3, 90, (size,), generator=generator)])
        tokens_L = own if row == len(sizes) - 1 else torch.cat([common, own])
        trained_L = torch.zeros(len(tokens_L), dtype=torch.bool)
        trained_L[-6:] = True
        found.append(Document(row, tokens_L, trained_L))
    return found


def made(folder: Path, family: str = "llama", *, replays: bool = True, **named: Any) -> FastModel:
    """`replays` False: the same arithmetic, and nothing ever comes often enough."""
    if not (folder / "config.json").exists():
        write_model(folder, family)
    dtype, dropout = named.pop("dtype", torch.float32), named.pop("dropout", 0.0)
    choices = Choices(kernels="torch", graphs=True, **named)
    model = FastModel(folder, LoraConfig(r=4, dropout=dropout), dtype=dtype, device=CPU, choices=choices)
    if not replays:
        model._replayed.uses_before = 1 << 60  # type: ignore[union-attr]
    random_adapter(model)
    return model


def answer(model: FastModel, documents: list[Document], scale: float = 1 / 37) -> tuple[float, torch.Tensor]:
    torch.manual_seed(5)  # of dropout
    model.grad_N.zero_()
    loss = float(model.backward(documents, scale))
    return loss, model.grad_N.clone()


def assert_same(ours: tuple[float, torch.Tensor], theirs: tuple[float, torch.Tensor]) -> None:
    assert ours[0] == theirs[0] and torch.equal(ours[1], theirs[1])


@pytest.mark.parametrize(
    ("family", "named"),
    [
        ("llama", {}),
        ("qwen3", {"dropout": 0.2}),
        ("gemma2", {"recompute": 1}),
        ("llama", {"dtype": torch.bfloat16, "budget_tokens": 64}),
        ("llama", {"attention": "eager"}),
    ],
)
def test_replayed_or_not_the_bits_are_the_same(
    tmp_path: Path, family: str, named: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of one shape and of others between them, until the first ones are replayed; the largest comes last, which
    moves buffers that recorded work knew."""
    if "attention" in named:  # and the logits of a micro-batch in several chunks
        monkeypatch.setattr(passes, "chunk_rows", lambda vocab: 16)
    replayed, plain = made(tmp_path, family, **named), made(tmp_path, family, replays=False, **named)
    sizes = [(9, 17, 30, 12)] * 5 + [(40, 2), (9, 17, 30, 12), (90, 120, 80, 3), (9, 17, 30, 12), (8, 16, 31, 11)]
    for seed, some in enumerate(sizes):
        assert_same(answer(replayed, rows(seed, some)), answer(plain, rows(seed, some)))
    assert replayed.graphs and plain.graphs == 0


def test_replayed_work_is_what_backward_was_without_it(tmp_path: Path) -> None:
    """Another padding and another place of the scale: no more than roundings."""
    replayed = made(tmp_path)
    usual = FastModel(tmp_path, LoraConfig(r=4), dtype=torch.float32, device=CPU, choices=Choices(kernels="torch"))
    random_adapter(usual)
    for seed in range(6):
        loss, grad_N = answer(replayed, rows(seed))
        usual_loss, usual_N = answer(usual, rows(seed))
        assert loss == pytest.approx(usual_loss, rel=1e-6)
        assert float((grad_N - usual_N).norm() / usual_N.norm()) < 1e-6


def test_gradients_are_added_as_ever(tmp_path: Path) -> None:
    model = made(tmp_path)
    _, once_N = answer(model, rows(1), 0.5)
    model.backward(rows(1), 0.5)
    assert torch.equal(model.grad_N, 2 * once_N)


def test_recorded_work_reads_and_writes_the_same_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a graph needs: after the first recording nothing is recorded anew and no table has another address; after a
    buffer has moved all is."""
    model = made(tmp_path)
    often, recorded = model._replayed, []
    assert often is not None
    record = often._record
    monkeypatch.setattr(often, "_record", lambda work: recorded.append(1) or record(work))
    for seed in range(5):
        answer(model, rows(seed))
    pieces = len(recorded)
    assert pieces == 3 == len(often._recorded)  # begin, the shape, end
    (inputs,) = often._inputs.values()
    held = [table.data_ptr() for table in inputs.tensors()]
    for seed in range(5, 9):
        answer(model, rows(seed))
    assert [table.data_ptr() for table in inputs.tensors()] == held and len(recorded) == pieces
    answer(model, rows(9, (200, 150)))  # buffers grow
    answer(model, rows(10))
    assert len(recorded) == 2 * pieces


def native(folder: Path, family: str = "llama", *, keeps: bool = True, **named: Any) -> FastModel:
    """By the kernels in C++. `keeps` False: all calls are made anew."""
    if not (folder / "config.json").exists():
        write_model(folder, family)
    dtype, dropout = named.pop("dtype", torch.float32), named.pop("dropout", 0.0)
    choices = Choices(kernels="native", **{"products": "native", **named})
    model = FastModel(folder, LoraConfig(r=4, dropout=dropout), dtype=dtype, device=CPU, choices=choices)
    if not keeps:
        model._passes.calls = None
    random_adapter(model)
    return model


def kept(model: FastModel) -> int:
    assert model._passes.calls is not None
    return model._passes.calls.kept


@pytest.mark.parametrize(
    ("family", "named"),
    [
        ("llama", {"dtype": torch.bfloat16}),
        ("llama", {"dtype": torch.bfloat16, "products": "torch"}),
        ("llama", {"dropout": 0.2, "streamed": 2}),
        ("phi3", {"budget_tokens": 64}),
        ("qwen3", {"dropout": 0.2, "dtype": torch.bfloat16}),
        ("gemma2", {"recompute": 2}),
        *((family, {}) for family in ("olmo2", "granite", "mistral-window", "llama-mha-biased")),
    ],
)
def test_calls_that_are_made_again_give_the_same_bits(tmp_path: Path, family: str, named: dict[str, Any]) -> None:
    """Other tokens, other scales, changed masters, validation between them, smaller steps by the calls of a larger one,
    and a still larger one, which moves buffers."""
    again, anew = native(tmp_path, family, **named), native(tmp_path, family, keeps=False, **named)
    sizes = [(9, 17, 30, 12)] * 2 + [(40, 2), (17, 9), (90, 120, 80, 3), (9, 17, 30, 12), (91, 120, 80, 3), (40, 2)]
    for seed, some in enumerate(sizes):
        if seed == 3:
            assert torch.equal(again.nll(rows(7)), anew.nll(rows(7)))
        assert_same(answer(again, rows(seed, some), 1 / (30 + seed)), answer(anew, rows(seed, some), 1 / (30 + seed)))
        for model in (again, anew):
            model.master_N.add_(0.01)
    assert kept(again) > 100


def test_of_what_has_moved_nothing_is_kept(tmp_path: Path) -> None:
    """A buffer that grows would live twice if a kept call still knew it."""
    model = native(tmp_path)
    for seed in range(3):
        answer(model, rows(seed))
    before, moves = kept(model), model._workspace.moves
    answer(model, rows(4, (90, 120, 80, 3)))
    assert before > 100 and kept(model) < before and model._workspace.moves > moves


@pytest.mark.parametrize(("family", "named"), [("mixtral", {}), ("llama", {"attention": "eager"})])
def test_what_answers_in_memory_of_its_own_is_not_kept(tmp_path: Path, family: str, named: dict[str, Any]) -> None:
    assert native(tmp_path, family, **named)._passes.calls is None


def test_kept_calls_are_whole_and_of_the_rows_at_hand() -> None:
    calls, there_TD, here_TD, made = Calls(), torch.zeros(6, 2), torch.ones(6, 2), list[int]()

    def work(number: int, rows: int, times: int = 1) -> int:
        calls.make(made.append, number)
        calls.rowwise(torch.Tensor.copy_, (there_TD[: rows * times], here_TD[: rows * times]), {})
        return number

    def fails() -> None:
        calls.make(made.append, 9)
        raise ValueError

    def moves() -> int:
        calls.make(made.append, 8)
        calls.forget()
        return work(7, 1)

    for _ in range(2):
        with pytest.raises(ValueError):
            calls.replayed("fails", fails)
        assert calls.replayed("moves", moves) == 7
    assert made == [9, 8, 7] * 2 and calls.kept == 0, "half a piece was kept"
    made.clear()
    for rows, number, copied in ((2, 1, 4), (1, 1, 2), (3, 4, 6), (2, 4, 4)):  # a larger step is kept anew
        calls.set_rows(rows)
        there_TD.zero_()
        assert calls.replayed("a", lambda rows=rows: work(rows + 1 if rows > 2 else 1, rows, times=2)) == number  # type: ignore[misc]
        assert int(there_TD[:, 0].sum()) == copied
    assert made == [1, 1, 4, 4] and calls.kept == 2


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_laid_ahead_is_what_is_laid_out_then(tmp_path: Path, dropout: float) -> None:
    model = made(tmp_path, dropout=dropout)
    documents, others = rows(1), rows(2)
    now = answer(model, documents)
    model.lay_ahead(documents, 5)
    model.lay_ahead(others, 5)
    assert_same(answer(model, documents), now)
    assert len(model._ahead) == 1
    model.lay_ahead(documents, 6)  # another draw than the one that comes
    assert_same(answer(model, documents), now)
    assert not model._ahead.keys() & {id(documents)}


def test_classes_are_few_and_hold_every_segment() -> None:
    sizes = [(60, 60), (70, 130), (90, 150), (100, 160), (110, 170), (65, 125)]
    (one,) = classes_of(sizes, few=True)
    assert (one.queries, one.keys, one.count) == (128, 256, 8) and one.places == 512
    assert one.numbers == (0, 1, 2, 3, 4, 5)
    uneven = [*sizes, (4000, 4000)]  # one long row must not make all of them long
    found = classes_of(uneven, few=True)
    assert sorted(number for like in found for number in like.numbers) == list(range(7)) and len(found) > 1
    exactly = classes_of(sizes, few=False)
    assert all(like.count == len(like.numbers) for like in exactly)
    assert sum(like.places for like in exactly) == sum(queries for queries, _ in sizes)
    assert classes_of([], few=True) == []
    assert [few_of(count) for count in (1, 2, 3, 5, 8, 9, 17)] == [1, 2, 4, 8, 8, 16, 24]


def test_what_comes_often_gets_a_graph_and_no_more_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    replay, recorded = Replay(CPU, Workspace(CPU), uses_before=2, max_graphs=2), list[str]()
    record = replay._record
    monkeypatch.setattr(replay, "_record", lambda work: recorded.append(name) or record(work))
    made = []
    for name in ("a", "a", "a", "a", "b", "c", "d", "b", "c", "b", *"ccccc", "a"):
        replay.piece(name, lambda name=name: made.append(name))  # type: ignore[misc]
    assert recorded == ["a", "b"] and len(made) == 16
