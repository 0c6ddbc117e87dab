"""The settings: their names, defaults and meanings (docs/config.md), how a config is read, and what is refused in it.

Derived and measured values are not settings: the plan chooses them and writes them to `config.resolved.yaml`.
"""

import difflib
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from hivetune.base.paths import path_hint, spelled
from hivetune.base.yaml_file import parse_yaml, read_yaml
from hivetune.errors import UsageError

MAX_TOKENS_A_ROW = 1 << 24  # far above any context; numbers in pages and plans stay small
ReportTarget = Literal["tensorboard", "mlflow", "trackio", "wandb"]


def _known_workers(value: Any) -> Any:
    address = isinstance(value, str) and re.fullmatch(r"[^\s:/]+:\d+", value)
    if value in (None, "auto") or address or (type(value) is int and 0 < value <= 64):
        return value
    raise ValueError("must be auto, a number from 1 to 64, or HOST:PORT of a cluster")


def setting(default: Any, meaning: str, **limits: Any) -> Any:
    """Return a setting with its default, its meaning and pydantic's limits."""
    return Field(default=default, description=meaning, **limits)


class Section(BaseModel):
    # Not strict: YAML 1.1 reads 1e-4 as text, which is a number here.
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_truth(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse true and false where a number belongs, because pydantic would read them as 1 and 0."""
        annotation = cls.model_fields[info.field_name or ""].annotation
        kinds = set(get_args(annotation) or (annotation,))
        if isinstance(value, bool) and kinds <= {int, float, type(None)}:
            raise ValueError("must be a number" + (" or null" if type(None) in kinds else ""))
        return value


class DataConfig(Section):
    path: str | list[str] = Field(description="files, globs, folders (from the config's folder), '-' or 'store'")
    columns: dict[str, str] = setting({}, "map of prompt, completion, ... to the columns of your rows")
    ignore: list[str] = setting([], "columns to leave unread")
    encoding: str | None = setting(
        None, "encoding of all files, such as cp1252; default: UTF-8, or their byte order mark"
    )
    max_rejected: float = setting(0.2, "maximum share of rejected rows; with more, the data is refused", ge=0, le=1)
    validation: float = setting(0.1, "share of rows held out to choose the best checkpoint", ge=0, lt=1)
    test: float = setting(0.1, "share of rows held out for the verdict", ge=0, lt=1)

    @field_validator("test")
    @classmethod
    def _leave_rows_to_train_on(cls, test: float, info: ValidationInfo) -> float:
        if test + info.data.get("validation", 0) >= 1:
            raise ValueError("must be below 1 - data.validation")
        return test

    balance: Literal["none", "agent", "category"] = setting(
        "none", "agent or category: train equally many rows of each value"
    )
    system_prompts: dict[str, str] = setting({}, "system prompt of each agent, for rows without one")
    on_overlong: Literal["reject", "split", "cut"] = setting(
        "reject", "rows longer than max_length: reject, split before questions, or cut"
    )
    also_train: list[Literal["failed", "untrusted", "own_answers"]] = setting(
        [], "train these rows too: failed, untrusted (text from tools or web pages), own_answers (nobody approved)"
    )
    on_private: Literal["redact", "reject", "keep"] = setting(
        "redact", "secrets and personal data: redact or keep them, or reject the row"
    )
    near_duplicates: float = setting(0.85, "minimum Jaccard similarity of near duplicates; 0: off", ge=0, le=1)
    max_rows: int | None = setting(None, "train on at most this many rows, chosen by a hash of their content", gt=0)


class LearnConfig(Section):
    """The rows to learn from (docs/learn.md)."""

    use: list[Literal["sft", "corrections", "pairs", "failures"]] = setting(
        ["sft", "corrections"],
        "rows to learn from: sft (good rows), corrections, pairs (a better and a worse answer), failures",
        min_length=1,
    )


class LoraConfig(Section):
    r: int = setting(16, "rank: 8 for style and format, 16 to 32 for new skills", gt=0, le=1 << 16)
    alpha: float = setting(32, "the update is scaled by alpha / r; usually twice the rank", gt=0)
    dropout: float = setting(0.0, "dropout on the adapter's input; 0.05 to 0.1 for few rows", ge=0, lt=1)
    target_modules: str | list[str] = setting("all-linear", "layers: all-linear, names such as q_proj, or '.*_proj'")
    start: str | None = setting(None, "start from the adapter in this folder (same base model)")


class EvalConfig(Section):
    prompts: int = setting(64, "held-out rows that both models answer", gt=0)
    tokens: int = setting(64, "maximum tokens of an answer", gt=0)
    checker: dict[str, Any] | None = setting(None, "checker of answers, for rows without one")
    baseline: str = setting("base", "compare with: base, NAME@VERSION, a run, a .gguf file or URL#MODEL", min_length=1)
    frozen: list[str] = setting([], "releases and files with questions that every evaluation asks and no run trains on")


class GateConfig(Section):
    """Thresholds of the verdict. A metric whose threshold is null is reported, but not required."""

    loss_gain: float | None = setting(0.0, "minimum gain in nats per token, required of the lower end of its interval")
    success_gain: float | None = setting(None, "minimum gain in the share of correct answers")
    min_success: float | None = setting(None, "minimum share of correct answers", gt=0, le=1)
    max_seconds: float | None = setting(None, "maximum mean time per answer, in seconds", gt=0)
    max_gb: float | None = setting(None, "maximum peak memory, in GB", gt=0)
    tolerance: float = setting(0.02, "how much worse a required metric may be before the verdict is abort", ge=0)


class CycleConfig(Section):
    """The loop that trains, judges and promotes by itself."""

    name: str | None = setting(None, "name of the release; required for a cycle")
    sources: list[str] = setting([], "sources to collect from before each cycle, as in hivetune collect SRC")
    after_rows: int = setting(200, "new groups of rows that start a cycle", gt=0)
    window: str | None = setting(None, "time of day for long work, such as 22:00-06:00")
    hours: float | None = setting(None, "hours of training that a cycle may plan", gt=0)
    promote: Literal["auto", "ask"] = setting("auto", "ask: a person promotes a release that passed")
    by: Literal["agent", "category"] | None = setting(
        None,
        "agent or category: each one with at least 200 rows also gets an adapter, served if better than the shared one",
    )
    watch: float = setting(24.0, "hours for which a new champion is watched", ge=0, le=24 * 30)
    notify: list[str] = setting([], "program and arguments that get promotions and problems as JSON on standard input")


class RunConfig(Section):
    """The settings of one YAML file. They identify a run, except those that data/identity.py leaves out."""

    model: str = Field(description="Hub id, folder, or smollm2-135m")
    data: DataConfig
    template: dict[str, bool | int | float | str] = setting(
        {}, "arguments of the chat template, such as {enable_thinking: false}"
    )
    learn: LearnConfig = LearnConfig()
    method: Literal["lora", "qlora"] = setting(
        "lora", "lora, or qlora, which keeps the base in 4 bits: a quarter of its memory, slower"
    )
    lora: LoraConfig = LoraConfig()
    max_length: int = setting(2048, "maximum length of a row, in tokens", ge=8, le=MAX_TOKENS_A_ROW)
    batch_size: int = setting(16, "examples per optimizer step, the effective batch size", gt=0)
    epochs: float = setting(3, "passes over the training rows", gt=0, le=100_000)
    max_steps: int | None = setting(None, "stop after this many optimizer steps", gt=0)
    learning_rate: float = setting(
        2e-4, "peak learning rate; LoRA needs about ten times that of full fine-tuning", gt=0
    )
    lr_schedule: Literal["cosine", "linear", "constant"] = setting("cosine", "decay of the rate after the warm-up")
    warmup: float = setting(0.05, "length of the warm-up: below 1 a share of the steps, else a number of steps", ge=0)
    weight_decay: float = setting(0.0, "decoupled weight decay, as in AdamW", ge=0)
    clip: float = setting(1.0, "maximum gradient norm; 0: no clipping", ge=0)
    validate_every: int | None = setting(None, "steps between validations; default: ten validations a run", gt=0)
    patience: int | None = setting(3, "validations without improvement before stopping early; null: never", gt=0)
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto", "precision; auto: bfloat16 where the machine computes it natively, else float32"
    )
    device: str = setting(
        "auto", "device to train on: auto, cpu, cuda or cuda:N (AMD cards too)", pattern=r"^(auto|cpu|cuda(:\d+)?)$"
    )
    workers: Annotated[int | str | None, BeforeValidator(_known_workers)] = setting(
        None, "processes that share each step: a number, auto, or HOST:PORT of a cluster"
    )
    seed: int = setting(0, "seed of the row order, the initial adapter and dropout")
    output: str | None = setting(None, "folder of the run; default: runs/NAME-HASH in the home")
    report_to: list[ReportTarget] = setting([], "send figures during training: tensorboard, mlflow, trackio, wandb")
    chunk_rows: int | None = setting(None, "train all epochs on this many rows, then on the next ones", gt=0)
    memory_share: float = setting(0.9, "maximum share of the device's memory to use", gt=0, le=1)
    allow: list[Literal["rank", "sample"]] = setting(
        [], "last changes that recovery may try: rank (halve it), sample (skip every second remaining row)"
    )
    eval: EvalConfig = EvalConfig()
    gate: GateConfig = GateConfig()
    cycle: CycleConfig = CycleConfig()

    @property
    def cluster(self) -> str | None:
        """Return HOST:PORT of the cluster that `workers` names, None without one."""
        return self.workers if isinstance(self.workers, str) and self.workers != "auto" else None


def load_config(path: Path, overrides: Iterable[str] = ()) -> RunConfig:
    """Return the config in `path` with each `a.b=c` of `overrides` applied.

    Relative `data.path` entries are relative to the folder of `path`; those of `overrides`, and model folders, to the
    working directory, as in a shell.
    Raises UsageError naming the file and the key, and for an unknown key the nearest known one.
    """
    try:
        tree = read_yaml(path)
    except OSError as error:
        hint = path_hint(error, "give the path of a YAML config")
        raise UsageError(f"cannot read {spelled(path)}: {error.strerror}", hint=hint) from None
    if not isinstance(tree, dict):
        hint = "it needs at least two lines: 'model: ...' and 'data: {path: ...}'"
        raise UsageError(f"{spelled(path)} contains no settings", hint=hint)
    data = tree.get("data")
    if path.is_file() and isinstance(data, dict) and "path" in data:  # not a pipe: `train <(...)` has no folder
        data["path"] = _resolved(data["path"], path.parent)
    return parse_config(tree, spelled(path), overrides)


def override_config(config: RunConfig, overrides: Iterable[str], option: str = "--set") -> RunConfig:
    """Return `config` with each `a.b=c` of `overrides` applied. Raises UsageError, naming `option`."""
    return parse_config(config.model_dump(mode="json"), "config", overrides, option)


def parse_config(
    tree: Mapping[str, Any], where: str = "config", overrides: Iterable[str] = (), option: str = "--set"
) -> RunConfig:
    """Return a config made from plain values, which stay as they are.

    Raises UsageError naming `where`, or `option` where an override is wrong, and the key of each problem.
    """
    settings, origins = _plain(tree), {}  # a copy: a caller loops over its own values
    for override in overrides:
        origin = f"{option} {override}"
        origins[_override(settings, override, origin)] = origin
    try:
        return RunConfig.model_validate(settings)
    except ValidationError as error:
        meanings = {setting.key: setting.meaning for setting in known_settings()}
        problems: dict[str, None] = {}
        for problem in error.errors():
            key = f"{_key_of(problem)}."
            # The option that set it, a part of it, or what it is a part of.
            by = (
                origin for name, origin in origins.items() if f"{name}.".startswith(key) or key.startswith(f"{name}.")
            )
            problems[f"{next(by, where)}: {refusal_text(problem, meanings)}"] = None
        raise UsageError("\n".join(problems), hint="list all settings: hivetune config") from None


def _plain(value: Any) -> Any:
    """Return a copy as YAML has it: overrides are written into mappings, and paths are text."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def written_settings(config: RunConfig) -> dict[str, Any]:
    """Return the settings that the config sets, without those left at their default."""
    tree = config.model_dump(mode="json", exclude_unset=True)
    return {name: value for name, value in tree.items() if value != {}}


def _resolved(entry: Any, folder: Path) -> Any:
    """Return `data.path` relative to the working directory instead of `folder`, the config's. What it can't be is left
    to validation."""
    if isinstance(entry, list):
        return [_resolved(each, folder) for each in entry]
    is_path = isinstance(entry, str) and entry not in ("", "-", "store") and entry[0] != "~" and "://" not in entry
    return str(folder / entry) if is_path else entry


@dataclass(frozen=True)
class KnownSetting:
    """A setting for display: its dotted name, its meaning, and its `default` as YAML, empty if it is required."""

    key: str
    default: str
    meaning: str


def known_settings(section: type[BaseModel] = RunConfig, prefix: str = "") -> list[KnownSetting]:
    """Return the settings in the order of the file."""
    settings = []
    for name, info in section.model_fields.items():
        kind = info.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            settings += known_settings(kind, f"{prefix}{name}.")
        else:
            default = "" if info.is_required() else json.dumps(info.default)
            settings.append(KnownSetting(prefix + name, default, info.description or ""))
    return settings


def _override(tree: dict[str, Any], override: str, origin: str) -> str:
    """Set one value in `tree`, and return its dotted name; `origin` is the option with its text."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise UsageError(f"{origin}: not of the form a.b=c", hint="for example --set lora.r=8")
    *parents, last = key.split(".")
    for parent in parents:
        if tree.get(parent) is None:  # unset, or `null` in a config that was written out
            tree[parent] = {}
        child = tree[parent]
        if not isinstance(child, dict):
            raise UsageError(f"{origin}: {parent} has no settings")
        tree = child
    tree[last] = parse_yaml(text, origin)  # as in the file: 1e-4 is a number, [a, b] a list
    return key


# What pydantic refuses, in words for the person who wrote it.

MAX_SHOWN_CHARS = 80  # of a value: a list may be a page long
_BRANCHES = ("str", "list[str]", "int")  # of a union, which pydantic names behind the setting


def _key_of(problem: Mapping[str, Any]) -> str:
    """Return the dotted name of the setting that a problem of `ValidationError.errors()` is about."""
    parts = [str(part) for part in problem["loc"]]
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] in _BRANCHES else parts)


def refusal_text(problem: Mapping[str, Any], settings: Mapping[str, str]) -> str:
    """Return one line on a refused setting. `settings`: each setting's dotted name and its meaning."""
    key, kind = _key_of(problem), problem["type"]
    if kind == "extra_forbidden":
        near = difflib.get_close_matches(key, settings, 1)
        # The right word in the wrong section.
        near = near or [name for name in settings if name.rpartition(".")[2] == key.rpartition(".")[2]]
        return f"unknown setting '{key}'" + (f", did you mean '{near[0]}'?" if near else "")
    if kind == "missing":
        return f"'{key}' is missing"
    if kind == "model_type":
        return f"'{key}' is a group of settings: set {next(name for name in settings if name.startswith(f'{key}.'))}"
    shown = repr(problem["input"])
    got = f"got {shown if len(shown) <= MAX_SHOWN_CHARS else shown[:MAX_SHOWN_CHARS] + '...'}"
    if key in settings and (kind == "string_pattern_mismatch" or len(problem["loc"]) > key.count(".") + 1):
        return f"'{key}': choose one of: {settings[key]}; {got}"
    return f"'{key}': {problem['msg'].removeprefix('Value error, ')}, {got}"
