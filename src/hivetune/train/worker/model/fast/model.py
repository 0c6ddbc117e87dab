"""The fast path's `LoraModel`: documents in, one flat row of tokens through the layers and back, gradients out.

Shapes: T tokens, D hidden, E entries of the loss, N adapter weights.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from hivetune.config import LoraConfig
from hivetune.run.choices import NO_CHOICES, Choices
from hivetune.train.plan.layout import (
    Layout,
    TrimmedDocument,
    bucketed,
    make_layout,
    multiples_of,
    shares_prefixes,
    split_documents,
    split_units,
    token_multiple,
    trim_document,
)
from hivetune.train.worker.model.adapter import scaling
from hivetune.train.worker.model.fast.computing import backend_of
from hivetune.train.worker.model.fast.graphs import Replay, can_replay
from hivetune.train.worker.model.fast.ops import Drop
from hivetune.train.worker.model.fast.passes import Passes, entry_nll, final_norm
from hivetune.train.worker.model.fast.spec import ModelSpec, read_spec
from hivetune.train.worker.model.fast.state import Walk
from hivetune.train.worker.model.fast.tables import BatchTables, drop_keys, lay_tables
from hivetune.train.worker.model.fast.weights.matrices import bind_adapter
from hivetune.train.worker.model.fast.weights.read import read_weights
from hivetune.train.worker.model.memory import Workspace, to_device
from hivetune.train.worker.model.preference import JudgedDocuments, judged_documents, preference_loss, units
from hivetune.train.worker.model.protocol import Document, Streamed, halved

FAST_BUDGET_TOKENS = 4096
# Steps that are laid out before their turn: the next one, and one that was dropped.
MAX_AHEAD = 2


class _Laid(NamedTuple):
    """The tables of a step's documents, computed before the step. `draw`: the seed of the dropout masks."""

    documents: Sequence[Document]
    draw: int | None
    tables: list[BatchTables]


class FastModel:
    """A `LoraModel` (worker/model/protocol.py) computed by hand.

    Choices it reads: streamed (layers whose weights do not stay), stream_from, budget_tokens (of a micro-batch),
    pack_tokens (its aim where there are workers), halvings (of each), recompute (layers whose inner state is recomputed
    in the backward pass), share_prefixes, token_multiple, graphs (few shapes, and frequent ones are replayed),
    products (of float32 on a CPU), kernels (native or torch), attention (eager: no
    fused kernel), rank_multiple (the plain kernels' thin products are padded with zeros to it; the native ones call no
    library for them).

    The attribute `kernels` says which run, and why if they are the plain ones. `quantized`: the layers' matrices are
    kept as NF4. Raises NotFast for a model that the fast path does not compute exactly.
    """

    path: Literal["fast", "general"] = "fast"
    why = ""

    def __init__(
        self,
        folder: Path,
        lora: LoraConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        choices: Choices = NO_CHOICES,
        first_layers: int | None = None,
        quantized: bool = False,
    ):
        self.device, self.dtype = device, dtype
        if device.type == "cuda":  # by default torch sums partial products in half precision there
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
            torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        self.spec: ModelSpec = read_spec(folder, first_layers)
        self._backend, self.kernels = backend_of(choices, device, dtype)
        self._ops, self.product = self._backend.ops, self._backend.multiply
        rank_multiple = choices.rank_multiple or 1 if self._ops.name == "torch" else 1
        columns = -(-lora.r // rank_multiple) * rank_multiple
        self.weights, self._stream = read_weights(
            folder, self.spec, lora, dtype, device, columns=columns, choices=choices, packed=quantized
        )
        self.num_streamed = self._stream.layers if self._stream else 0
        self.master_N, self._sum_N, self.adapter = bind_adapter(self.weights, lora, device, columns=columns)
        self.budget_tokens = choices.budget_tokens or FAST_BUDGET_TOKENS
        self.pack_tokens = choices.pack_tokens
        self.halvings = choices.halvings or 0
        self._scaling, self._lora = scaling(lora), lora
        self._passes = Passes(
            self.spec,
            self.weights,
            self._ops,
            scaling=self._scaling,
            recompute=min(choices.recompute or 0, len(self.spec.layers)),
            keep_calls=not self._backend.eager and not any(layer.experts for layer in self.spec.layers),
        )
        self._workspace = Workspace(device, forget=self._passes.forget)
        self._replayed: Replay | None = None
        if choices.graphs and can_replay(self.spec, self._ops, self.num_streamed):
            self._replayed = Replay(device, self._workspace)
        precision = str(dtype).removeprefix("torch.")
        multiple = choices.token_multiple or token_multiple(device.type, precision, choices.products)
        self._pad = bucketed if self._replayed else multiples_of(multiple)
        # Replayed work sums its gradients unscaled in a buffer of its own: the scale differs from step to step.
        self.grad_N = torch.zeros_like(self._sum_N) if self._replayed else self._sum_N
        self._total, self._part = (torch.zeros((), dtype=self.master_N.dtype, device=device) for _ in "12")
        self._scale = torch.zeros(1, dtype=self.master_N.dtype, device=device)
        self._share_in_scoring = choices.share_prefixes is not False
        self.share_prefixes = self._share_in_scoring and shares_prefixes(lora)
        self._ahead: dict[int, _Laid] = {}

    @property
    def graphs(self) -> int | None:
        return None if self._replayed is None else self._replayed.shapes

    def streamed(self) -> Streamed:
        return self._stream.report() if self._stream else Streamed()

    def backward(self, documents: Sequence[Document], scale: float) -> Tensor:
        return self.compute(self.lay_out(documents), scale)

    def repeat(self, name: str, work: Callable[[], None]) -> None:
        if self._replayed is None:
            work()
        else:
            self._replayed.piece(name, work)

    def lay_ahead(self, documents: Sequence[Document], seed: int) -> None:
        draw = self._draw(torch.Generator().manual_seed(seed))
        laid = _Laid(documents, draw, list(self._all_tables(documents, draw)))
        while len(self._ahead) >= MAX_AHEAD:
            self._ahead.pop(next(iter(self._ahead)))
        self._ahead[id(documents)] = laid

    def lay_out(self, documents: Sequence[Document]) -> Iterable[BatchTables]:
        """Return the tables of the micro-batches of a step, on the host: prepared ahead, else made one by one.

        This is the host's whole work, but for copying them to the device.
        """
        draw, laid = self._draw(), self._ahead.pop(id(documents), None)
        if laid is not None and laid.documents is documents and laid.draw == draw:
            return laid.tables
        return self._all_tables(documents, draw)

    def micro_batches(self, documents: Sequence[Document]) -> list[list[int]]:
        return self._split(_rows(documents))

    def backward_one(self, documents: Sequence[Document], scale: float) -> Tensor:
        return self.compute([self._tables(self._layout(_rows(documents)), self._draw())], scale)

    @torch.no_grad()
    def compute(self, micro_batches: Iterable[BatchTables], scale: float) -> Tensor:
        """Compute `backward` of micro-batches, one by one while the device computes the one before.

        Nothing here waits for the device, copies from it, or has a shape that depends on what it computed
        (tests/train/worker/model/test_host.py), except for the routing of experts. Replayed work that has come often
        enough is one call, however many kernels it has.
        """
        if self._replayed is None:
            self._begin()
            for tables in micro_batches:
                self._add(tables.on(self.device), scale)
        else:
            to_device(self._scale, (scale,))
            self._replayed.piece("begin", self._begin)
            for tables in micro_batches:
                self._replayed.micro_batch(tables, lambda inputs: self._add(inputs, 1.0))
            self._replayed.piece("end", lambda: self.grad_N.addcmul_(self._sum_N, self._scale))
        return self._total.clone()

    def _begin(self) -> None:
        if self._replayed is not None:
            self._sum_N.zero_()
        self._total.zero_()
        self._passes.refresh()

    def _add(self, tables: BatchTables, scale: float) -> None:
        """Add forward and backward of one micro-batch to the gradient and the total."""
        nll_E = self._passes.forward_backward(self._walk(tables, scale=scale, keep=True))
        self._total.add_(torch.dot(nll_E, tables.count_E, out=self._part))

    @torch.no_grad()
    def backward_judged(self, documents: Sequence[Document], scale: float, beta: float) -> Tensor:
        """Compute as `compute` does, without replay; answers that are compared are in one micro-batch."""
        rows, parts, draw = _rows(documents), units(documents), self._draw()
        losses: list[Tensor] = [torch.zeros(2, dtype=self.master_N.dtype, device=self.device)]
        self._begin()
        for batch in halved(split_units(rows, parts, self.budget_tokens, share=self.share_prefixes), self.halvings):
            numbers = [number for unit in batch for number in unit]
            layout = self._layout([rows[number] for number in numbers])
            judged = judged_documents([documents[number] for number in numbers], self.device, self.master_N.dtype)
            owner_M, entry_M = self._owners(layout, range(len(numbers)))

            def weigh(
                nll_E: Tensor, judged: JudgedDocuments = judged, owner_M: Tensor = owner_M, entry_M: Tensor = entry_M
            ) -> Tensor:
                nll_B = torch.zeros_like(judged.good_B).index_add_(0, owner_M, nll_E[entry_M])
                weight_B, loss = preference_loss(judged, nll_B, beta)
                losses.append(loss)
                return torch.zeros_like(nll_E).index_add_(0, entry_M, weight_B[owner_M])

            walk = self._walk(self._tables(layout, draw).on(self.device), scale=scale, keep=True)
            self._passes.forward_backward(walk, weigh)
        if self._replayed is not None:
            self.grad_N.add_(self._sum_N)
        return torch.stack(losses).sum(0)

    @torch.no_grad()
    def nll(self, documents: Sequence[Document], *, adapter: bool = True) -> Tensor:
        self._passes.refresh()
        rows = _rows(documents)
        sums_B = torch.zeros(len(documents), dtype=self.master_N.dtype, device=self.device)
        for batch in halved(split_documents(rows, self.budget_tokens, share=self._share_in_scoring), self.halvings):
            layout = make_layout([rows[index] for index in batch], share=self._share_in_scoring, pad=self._pad)
            walk = self._walk(self._tables(layout).on(self.device), adapter=adapter)
            nll_E = entry_nll(walk, final_norm(walk, *self._passes.forward_only(walk))[0], None)
            index_M, entry_M = self._owners(layout, batch)
            sums_B.index_add_(0, index_M, nll_E[entry_M])
        return sums_B

    def _owners(self, layout: Layout, numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return, on the device, entries of a layout and the numbers of the documents that each belongs to."""
        owners = [(number, entry) for number, owned in zip(numbers, layout.owners, strict=True) for entry in owned]
        owner_M, entry_M = torch.tensor(owners, dtype=torch.int64, device=self.device).t()
        return owner_M, entry_M

    @torch.no_grad()
    def logits(self, tokens: Sequence[int], *, adapter: bool = True) -> Tensor:
        """Return the logits [len(tokens), V] of one document, in the dtype of the model."""
        self._passes.refresh()
        everything = TrimmedDocument(tuple(tokens), tuple((index, 0) for index in range(len(tokens))))
        walk = self._walk(self._tables(make_layout([everything], share=False)).on(self.device), adapter=adapter)
        logits_TV = final_norm(walk, *self._passes.forward_only(walk))[0] @ self.weights.head_VD.t()
        cap = self.spec.logit_softcap
        return logits_TV if cap is None else cap * torch.tanh(logits_TV / cap)

    def _split(self, rows: Sequence[TrimmedDocument]) -> list[list[int]]:
        batches = split_documents(
            rows, self.budget_tokens, share=self.share_prefixes, aim_tokens=self.pack_tokens or self.budget_tokens
        )
        return halved(batches, self.halvings)

    def _layout(self, rows: Sequence[TrimmedDocument]) -> Layout:
        return make_layout(rows, share=self.share_prefixes, pad=self._pad)

    def _draw(self, generator: torch.Generator | None = None) -> int | None:
        """Return the seed of a step's masks, from the generator that the loop seeds."""
        return int(torch.randint(2**62, (), generator=generator)) if self._lora.dropout else None

    def _walk(self, batch: BatchTables, *, adapter: bool = True, scale: float = 1.0, keep: bool = False) -> Walk:
        """Return a micro-batch, whose tables are on the device, at its first layer."""
        return Walk(
            self.spec,
            self.weights,
            self._ops,
            self._workspace,
            self.dtype,
            batch,
            self._backend.attention(batch.layout, batch.attention, self.spec, self._workspace),
            adapter=adapter,
            drop=None if batch.key_T is None else Drop(batch.key_T, self._lora.dropout, self._workspace),
            scale=scale,
            up_scale=scale * self._scaling,
            keep=keep,
        )

    def _all_tables(self, documents: Sequence[Document], draw: int | None) -> Iterator[BatchTables]:
        rows = _rows(documents)
        for batch in self._split(rows):
            yield self._tables(self._layout([rows[index] for index in batch]), draw)

    def _tables(self, layout: Layout, draw: int | None = None) -> BatchTables:
        """Return the tables of a layout.

        `draw`: what dropout's masks follow from besides the rows; None without dropout.
        """
        attention = self._backend.attention_tables(layout, self.spec, few=self._replayed is not None)
        keys = None if draw is None else drop_keys(layout, draw, whole_rows=not shares_prefixes(self._lora))
        tables = lay_tables(layout, self.spec, self.dtype, attention, pad=self._pad, keys=keys)
        return tables if self.device.type == "cpu" else tables.changed(Tensor.pin_memory)  # a card reads it by itself


def _rows(documents: Sequence[Document]) -> list[TrimmedDocument]:
    return [trim_document(document.tokens_L.tolist(), document.trained_L.tolist()) for document in documents]
