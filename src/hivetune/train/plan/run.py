"""The plan of a config: memory, time and disk from sizes alone, for rows that are counted here, and what would fit."""

import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from hivetune.base.database import database_path, open_database
from hivetune.base.disk import scratch_folder
from hivetune.base.units import size
from hivetune.config import DataConfig, RunConfig
from hivetune.data.files.find import find_sources, is_pipe
from hivetune.data.files.kinds import parquet_rows_and_bytes
from hivetune.data.files.rows import read_rows
from hivetune.data.files.unpack import COMPRESSED
from hivetune.data.mapping import check_columns
from hivetune.data.prepare.prepare import check
from hivetune.data.prepare.understand import rows_of_files
from hivetune.data.raw import RawRow, Source
from hivetune.data.read import read_example
from hivetune.data.reasons import RowRefused
from hivetune.errors import DoesNotFit, MachineNotFit, UsageError
from hivetune.machine.inventory import Machine, read_machine
from hivetune.machine.knowledge.cards import known_model
from hivetune.machine.profile import read_profile
from hivetune.models.architecture import Architecture, parse_architecture, read_architecture
from hivetune.models.prepared import find_prepared
from hivetune.train.plan.choose import (
    Choice,
    Workload,
    assumed_workload,
    choose_dtype,
    first_that_fits,
    power_loss_s,
    with_advice,
)
from hivetune.train.plan.device import Device, device_of_card, device_of_machine
from hivetune.train.plan.memory import TrainingSetup, disk_bytes, setup_of
from hivetune.train.plan.speed import (
    LAST_RUN,
    LAST_RUN_ERROR,
    Rate,
    published_rate,
    rate_key,
)

# English prose by the vocabularies of SmolLM2 and Qwen2.5, and the tokens that templates write around a message.
CHARS_PER_TOKEN, TOKENS_A_MESSAGE = 4.4, 5
ASSUMED_ROWS, ASSUMED_TOKENS = 1500, 150
CHECKED_BYTES, CHECKED_ROWS = 2_000_000, 4_000  # one to two seconds of processor time, tokens included
COUNTED_BYTES = 20_000_000  # a CSV file of it takes 0.6 s of processor time, JSON Lines 0.2 s
PART_BYTES = 8_000_000
_PACKED = 8  # a part of a compressed file is so many times smaller
SAMPLED, SAMPLED_OF_MORE = 300, 50  # rows that are read as conversations: the first ones, and one in 50 of the others


_UNFIT = ", but none can be trained; hivetune check says why"


@dataclass(frozen=True)
class CountedRows:
    """The number of rows. `tokens`: mean of a row, estimated from its characters. `words`: the number and how it is
    known.
    """

    rows: int
    tokens: float
    words: str


class _Part(NamedTuple):
    """Rows that were found in `read_bytes` of the files, and about how many tokens they have."""

    rows: int
    tokens: float
    read_bytes: int


class _Sources(NamedTuple):
    """The sources in `data.path`: files, whether one is a pipe (read once), and whether the store is among them."""

    files: list[str]
    piped: bool
    stored: bool

    @property
    def size_bytes(self) -> int:
        return sum(map(os.path.getsize, self.files))


def _sources_of(data: DataConfig) -> _Sources:
    sources = find_sources(data.path)
    files = [name for name in sources if name != "store"]
    return _Sources(files, any(name == "-" or is_pipe(name) for name in files), len(files) < len(sources))


def refuse_missing(data: DataConfig) -> None:
    """Raise UsageError when `data.path` names nothing that exists, or files without a row."""
    sources = _sources_of(data)
    if sources.piped or sources.size_bytes or (sources.stored and stored_rows().rows):
        return
    fault = f"{sources.files[0]} is empty" if sources.files else "the store is empty"
    raise UsageError(fault, hint="to plan without rows, state how many there will be: --rows N --tokens N")


def rows_to_train(config: RunConfig, model_folder: Path | None) -> CountedRows:
    """Return the rows that a config trains on.

    Few rows are checked, with the tokens that this model gives them, as `init` does. More are counted by `count_rows`,
    less the share that is held out. Raise UsageError for a mapping that no check would take.
    """
    data, unfit = config.data, False
    check_columns(data.columns)
    # Counting says why a check could not be made.
    with contextlib.suppress(UsageError, MachineNotFit, DoesNotFit, OSError):
        sources = _sources_of(data)
        few = not sources.piped and sources.size_bytes <= CHECKED_BYTES
        if model_folder is not None and few and (not sources.stored or stored_rows().rows <= CHECKED_ROWS):
            checked = check(data, model_folder=model_folder, max_length=config.max_length, learn=config.learn)
            if checked.document["splits"]["train"]:
                return checked_rows(checked.document)
            unfit = True
    counted = count_rows(data)
    rows = max(1, round(counted.rows * (1 - data.validation - data.test)))
    return replace(counted, rows=rows, words=counted.words.removesuffix(_UNFIT) + _UNFIT if unfit else counted.words)


def checked_rows(report: Mapping[str, Any]) -> CountedRows:
    """Return the rows by the document of `data check` with a model."""
    basis = f"{report['rows_in']:,} rows checked"
    return CountedRows(report["splits"]["train"], report["tokens"] / report["usable"], basis)


def count_rows(data: DataConfig) -> CountedRows:
    """Return the rows of `data.path`; where they can't be counted, an assumption with the reason in `words`."""
    try:
        sources = _sources_of(data)
        if sources.piped:
            return _assumed("standard input and pipes are read once, by the training itself")
        total_bytes = sources.size_bytes
        part = (_count if total_bytes <= COUNTED_BYTES else _first_part)(sources.files, data)
        stored = stored_rows() if sources.stored else _Part(0, 0, 0)
    except (UsageError, MachineNotFit) as error:
        return _assumed(error.message)
    except OSError as error:
        return _assumed(f"{error.filename}: {error.strerror}")
    share = part.read_bytes / total_bytes if total_bytes else 1.0
    rows = round(part.rows / share) + stored.rows
    if not rows:
        return _assumed("no row was found" + ("" if share == 1 else f" in the first {size(part.read_bytes)}"))
    tokens = (part.tokens / share + stored.tokens) / rows
    about = f"about {float(f'{rows:.2g}'):,.0f} rows, from the first {size(part.read_bytes)}"
    words = f"{rows:,} rows counted" if share == 1 else about
    return CountedRows(rows, tokens or ASSUMED_TOKENS, words if tokens else words + _UNFIT)


def _assumed(reason: str) -> CountedRows:
    return CountedRows(ASSUMED_ROWS, ASSUMED_TOKENS, f"{ASSUMED_ROWS:,} rows assumed: {reason}")


def stored_rows() -> _Part:
    """Return the rows of the store."""
    path = database_path()
    if not path.exists():
        return _Part(0, 0, 0)
    with closing(open_database(path)) as database:
        rows, first = database.execute("SELECT count(*), min(rowid) FROM interactions").fetchone()
    if not rows:
        return _Part(0, 0, 0)
    sample = Source(str(path), "store", "store", size=first + SAMPLED)
    return _Part(rows, rows * _mean_tokens(read_rows(sample), {})[1], 0)


def _count(sources: Sequence[str], data: DataConfig) -> _Part:
    """Return all rows of these files, as `data check` finds them. Raises as `rows_of_files`."""
    rows, mean = _mean_tokens(rows_of_files(sources, data.columns), data.columns)
    return _Part(rows, rows * mean, sum(map(os.path.getsize, sources)))


def _mean_tokens(raws: Iterable[RawRow], columns: Mapping[str, str]) -> tuple[int, float]:
    """Return how many rows there are, and about how many tokens one of them has, 0 if none can be read."""
    rows = 0
    sampled: list[float] = []
    for raw in raws:
        if raw.problem is not None:
            continue
        rows += 1
        if rows <= SAMPLED or rows % SAMPLED_OF_MORE == 0:
            with contextlib.suppress(RowRefused, RecursionError):  # the checks say why; it is not trained
                messages = read_example(raw, columns).example.messages
                texts = (text for m in messages for text in (m.content, m.reasoning or "", *map(str, m.tool_calls)))
                sampled.append(sum(map(len, texts)) / CHARS_PER_TOKEN + TOKENS_A_MESSAGE * len(messages))
    return rows, sum(sampled) / max(1, len(sampled))


def _first_part(sources: Sequence[str], data: DataConfig) -> _Part:
    """Return the rows of the first PART_BYTES. Parquet files state their number of rows, so they are counted whole."""
    rows, tokens, read_bytes = 0, 0.0, 0
    with scratch_folder() as folder:
        for number, name in enumerate(sources):
            size = parquet_rows_and_bytes(name)
            if size is not None:
                counted = _Part(size[0], size[1] / CHARS_PER_TOKEN, os.path.getsize(name))
            elif read_bytes < PART_BYTES:
                part = folder / str(number) / os.path.basename(name)
                part.parent.mkdir()
                copied = _copy_beginning(name, part, PART_BYTES - read_bytes)
                counted = _count([str(part)], data)._replace(read_bytes=copied)
            else:
                continue
            rows, tokens, read_bytes = rows + counted.rows, tokens + counted.tokens, read_bytes + counted.read_bytes
    return _Part(rows, tokens, max(read_bytes, 1))


def _copy_beginning(name: str, part: Path, most_bytes: int) -> int:
    """Copy whole lines, at most `most_bytes` of them. Return how many bytes were copied."""
    packed = name.lower().endswith(COMPRESSED)
    with open(name, "rb") as file, open(part, "wb") as out:
        content = file.read(max(1, most_bytes // (_PACKED if packed else 1)))
        if not packed and file.read(1):
            content = content[: content.rfind(b"\n") + 1] or content
        out.write(content)
    return len(content)


@dataclass(frozen=True)
class Planned:
    """The content of `hivetune plan`. `choice` is None when nothing fits."""

    config: RunConfig
    device: Device
    work: Workload
    setup: TrainingSetup
    choice: Choice | None
    refusal: DoesNotFit | None
    """Why nothing fits, with what would as its hint."""
    rows_known: str
    """The number of rows and how it is known, in words."""
    time_known: str = ""
    """What the time is estimated from, in words; empty where nothing is known."""

    @property
    def power_loss_s(self) -> float:
        """Return the most seconds of work that a power cut can lose; 0 where nothing fits."""
        return 0.0 if self.choice is None else power_loss_s(self.choice.step_s or 0.0)


def plan_run(
    config: RunConfig,
    *,
    card: str | None = None,
    cores: int | None = None,
    memory_gb: float | None = None,
    rows: int | None = None,
    tokens: int | None = None,
) -> Planned:
    """Return the plan of a config.

    Raises UsageError for an unknown model or card.
    """
    architecture = find_architecture(config.model)
    machine = read_machine(folder=Path(config.output) if config.output else None)
    device = (
        device_of_card(card, cores=cores, memory_gb=memory_gb) if card else device_of_machine(machine, config.device)
    )
    prepared = find_prepared(config.model, config.template)
    work, basis = guess_workload(config, rows, tokens, prepared.folder if prepared else None)
    lora, dtype = config.lora, choose_dtype(config.dtype, device)
    quantized = config.method == "qlora"
    setup = setup_of(architecture, lora.r, lora.target_modules, dtype, device.kind, quantized=quantized)
    rate = None if card else _last_rate(machine, setup)
    if rate is None and dtype in device.rates:
        rate = published_rate(device.rates[dtype], f"published: {device.source}")
    choice, refusal = None, None
    try:
        choice = first_that_fits(setup, device, work, memory_share=config.memory_share, rate=rate)
    except DoesNotFit as error:
        refusal = with_advice(error, setup, device, work, config.memory_share)
    return Planned(
        config,
        device,
        work,
        setup,
        choice,
        refusal,
        rows_known=basis,
        time_known=rate.source if rate else "",
    )


def _last_rate(machine: Machine, setup: TrainingSetup) -> Rate | None:
    known = read_profile(machine.fingerprint).rates.get(rate_key(setup))
    return None if known is None else Rate(known, LAST_RUN_ERROR, LAST_RUN)


def find_architecture(name: str) -> Architecture:
    """Return the sizes of a prepared model, of a folder with config.json, or of a model that is known by its sizes."""
    if Path(name).is_dir():
        prepared = find_prepared(name)
        return read_architecture(prepared.folder if prepared else Path(name))
    config = known_model(name)
    prepared = None if config else find_prepared(name)
    if prepared:
        return read_architecture(prepared.folder)
    if config is None:
        raise UsageError(f"the sizes of model {name} are not known yet", hint=f"get it first: hivetune fetch {name}")
    return parse_architecture(config, name)


def guess_workload(
    config: RunConfig, rows: int | None, tokens: int | None, model_folder: Path | None = None
) -> tuple[Workload, str]:
    """Return the workload and, in words, its basis: the user's numbers, else the data's rows, else an assumption."""
    if tokens and tokens > config.max_length:
        message = f"rows of {tokens:,} tokens are longer than max_length, {config.max_length:,}, and are not trained"
        raise UsageError(message, hint="raise it: --set max_length=N")
    counted = None if rows and tokens else rows_to_train(config, model_folder)
    num_rows = rows or (counted.rows if counted else 1)
    basis = "as given" if rows or counted is None else counted.words
    work = assumed_workload(
        longest=config.max_length,
        mean=tokens or (counted.tokens if counted else 1),
        rows=num_rows,
        batch_size=config.batch_size,
        epochs=config.epochs,
        max_steps=config.max_steps,
    )
    return work, basis


def plan_document(planned: Planned) -> dict[str, Any]:
    """Return the one document of `plan --json`."""
    config, setup, choice, device = planned.config, planned.setup, planned.choice, planned.device
    content: dict[str, Any] = {
        "model": config.model,
        "parameters": setup.architecture.parameters,
        "trained_parameters": setup.adapter_parameters,
        "target": {name: getattr(device, name) for name in ("name", "kind", "memory_bytes", "free_bytes")},
        "workload": {name: getattr(planned.work, name) for name in ("rows", "longest", "batch_size", "epochs", "steps")}
        | {"rows_known": planned.rows_known},
        "fits": choice is not None,
        "disk_bytes": disk_bytes(setup),
    }
    if choice is None:
        assert planned.refusal is not None
        return {**content, "refusal": planned.refusal.message, "hint": planned.refusal.hint}
    hours = None if choice.step_s is None else choice.step_s * planned.work.steps / 3600
    made = {"device": device.torch_name, "dtype": setup.dtype, **choice.to_choices().made()}
    return {
        **content,
        "choices": {**made, "micro_batches": choice.micro_batches},
        "memory": {"parts": dict(choice.peak.parts), "peak_bytes": choice.peak.bytes, "error": choice.peak.error},
        "limit_bytes": choice.limit_bytes,
        "step_s": choice.step_s,
        "hours": hours,
        "hours_range": None if hours is None else [hours * (1 - choice.error), hours * (1 + choice.error)],
        "time_known": planned.time_known,
        "power_loss_s": planned.power_loss_s,
    }
