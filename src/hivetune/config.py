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
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from hivetune.base.paths import path_hint, spelled
from hivetune.base.yaml_file import parse_yaml, read_yaml
from hivetune.errors import UsageError

MAX_TOKENS_A_ROW = 1 << 24
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
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_truth(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse yes and no where a number belongs, which pydantic would read as 1 and 0."""
        annotation = cls.model_fields[info.field_name or ""].annotation
        kinds = set(get_args(annotation) or (annotation,))
        if isinstance(value, bool) and kinds <= {int, float, type(None)}:
            raise ValueError("must be a number" + (" or null" if type(None) in kinds else ""))
        return value


class DataConfig(Section):
    path: str | list[str] = Field(
        description="files, globs or folders of rows (relative to the config), '-' for standard input, or 'store'"
    )
    columns: dict[str, str] = setting({}, "map of prompt, completion, ... to the columns of your rows")
    encoding: str | None = setting(None, "encoding of all files, such as cp1252; default: detected")
    max_rejected: float = setting(0.2, "maximum share of rejected rows; with more, the data is refused", ge=0, le=1)
    validation: float = setting(0.1, "share of rows held out to choose the best step", ge=0, lt=1)
    test: float = setting(0.1, "share of rows held out for the verdict", ge=0, lt=1)

    @field_validator("test")
    @classmethod
    def _leave_rows_to_train_on(cls, test: float, info: ValidationInfo) -> float:
        if test + info.data.get("validation", 0) >= 1:
            raise ValueError("with data.validation it leaves no row to train on")
        return test

    split: Literal["content", "time"] = setting("content", "content: by a hash of the row; time: the newest")
    group_by: Literal["auto", "session", "user", "none"] = setting(
        "auto", "rows that stay in one split; auto: small sessions and users"
    )
    balance: Literal["none", "agent", "category"] = setting(
        "none", "train the same number of rows of each agent or category"
    )
    system_prompts: dict[str, str] = setting({}, "system prompt of each agent, for rows without one")
    on_overlong: Literal["reject", "cut_turns", "cut"] = setting(
        "reject", "rows longer than max_length: reject them, drop the last turns, or cut tokens"
    )
    on_failed: Literal["set_aside", "train"] = setting("set_aside", "rows whose success is false")
    on_untrusted: Literal["set_aside", "train"] = setting("set_aside", "text from tools or web pages")
    on_own_answers: Literal["set_aside", "train"] = setting("set_aside", "answers of a release that nobody approved")
    on_tools: Literal["train", "leave_out"] = setting("train", "tool calls and their results")
    on_reasoning: Literal["train", "leave_out"] = setting("train", "reasoning before an answer")
    on_secret: Literal["redact", "reject", "keep"] = setting("redact", "keys, tokens, passwords")
    on_personal: Literal["redact", "reject", "keep"] = setting(
        "redact", "mail addresses, phone, card and account numbers"
    )
    near_duplicates: float = setting(0.85, "Jaccard similarity from which rows count as duplicates; 0: off", ge=0, le=1)
    quota_per_source: int | None = setting(None, "maximum rows from one source", gt=0)
    quota_per_session: int | None = setting(None, "maximum rows from one session", gt=0)
    synthetic_share: float = setting(0.5, "maximum share of synthetic rows", ge=0, le=1)
    leave_out: str | None = setting(None, "file with row ids to set aside and the reasons")


class LearnConfig(Section):
    """Settings for the rows to learn from and the weight of bad answers (docs/learn.md)."""

    use: list[Literal["sft", "corrections", "pairs", "failures"]] = setting(
        ["sft", "corrections"],
        "rows to learn from: sft (good rows), corrections, pairs (a better and a worse answer), failures",
        min_length=1,
    )
    stage: Literal[1, 2] = setting(1, "2: learn from bad answers too, starting from lora.start")
    steps: int = setting(40, "optimizer steps of stage 2", gt=0)
    rate: float = setting(0.2, "learning rate of stage 2, as a share of learning_rate", gt=0, le=1)
    weight: float = setting(0.5, "maximum weight of a bad row; a good row has 1", ge=0, le=1)
    beta: float = setting(5.0, "a bad row has no effect after about 4 / beta nats", gt=0)
    quota_per_user: int = setting(100, "maximum bad rows from one user", gt=0)


class LoraConfig(Section):
    r: int = setting(16, "rank: 8 for style and format, 16 to 32 for new skills", gt=0, le=1 << 16)
    alpha: float = setting(32, "the update is scaled by alpha / r; usually twice the rank", gt=0)
    dropout: float = setting(0.0, "dropout on the adapter's input; 0.05 to 0.1 for few rows", ge=0, lt=1)
    dropout_per: Literal["token", "row"] = setting(
        "token", "token: compute shared prefixes once; row: each row has its own mask"
    )
    target_modules: str | list[str] = setting(
        "all-linear", "layers: all-linear, names such as q_proj, or a pattern such as '.*_proj'"
    )
    rslora: bool = setting(False, "scale by alpha / sqrt(r) instead; for ranks above 32")
    start: str | None = setting(None, "start from the adapter in this folder (same base model)")


class EvalConfig(Section):
    prompts: int = setting(64, "held-out rows that both models answer", gt=0)
    new_tokens: int = setting(64, "maximum tokens of an answer", gt=0)
    slots: int = setting(8, "answers generated at the same time", gt=0, le=1024)
    baseline: str = setting(
        "base",
        "model to compare with: base, NAME@VERSION, a run, a .gguf file, URL#MODEL, or a .yaml file",
        min_length=1,
    )
    latency_prompts: int = setting(50, "prompts answered one at a time, to measure latency", gt=0)
    checker: dict[str, Any] | None = setting(None, "checker of answers, for rows without one")
    judge: str | None = setting(
        None, "model that compares answers: URL#MODEL, a .gguf file, a release, base", min_length=1
    )
    frozen: list[str] = setting([], "releases and files with questions to ask in every evaluation and never train")
    general: bool = setting(True, "also ask the general questions that ship with Hivetune")


class ExportConfig(Section):
    converter: str | None = setting(
        None, "folder of a llama.cpp checkout that writes GGUF files; default: fetched", min_length=1
    )


class GateConfig(Section):
    """Thresholds of the verdict; a metric whose threshold is null is reported, not required."""

    loss_gain: float | None = setting(0.0, "minimum gain in nats per token, as a lower bound")
    success_gain: float | None = setting(None, "minimum gain in the share of correct answers")
    latency_ratio: float | None = setting(1.5, "maximum time per answer, tuned / base", gt=0)
    memory_ratio: float | None = setting(1.5, "maximum peak memory, tuned / base", gt=0)
    least_success: float | None = setting(None, "minimum share of correct answers", gt=0, le=1)
    most_latency_s: float | None = setting(None, "maximum mean time per answer", gt=0)
    most_memory_gb: float | None = setting(None, "largest peak memory", gt=0)
    preferred_gain: float | None = setting(
        None, "minimum gain in the share of answers that eval.judge prefers", ge=-1, le=1
    )
    judge_alone: bool = setting(False, "accept these answers as the only evidence")
    least_kept: float | None = setting(0.9, "minimum share of frozen questions still answered correctly", gt=0, le=1)
    least_general: float | None = setting(
        None, "minimum share of general questions still answered correctly", gt=0, le=1
    )
    length_drift: float | None = setting(None, "maximum factor in the length of answers", ge=1)
    more_loops: float | None = setting(None, "maximum rise of repetitive answers", ge=0, le=1)
    more_refusals: float | None = setting(None, "maximum rise of refusals", ge=0, le=1)
    look: int | None = setting(None, "number of candidates judged against the champion so far; a cycle sets it", gt=0)
    tolerance: float = setting(0.02, "how much worse a required metric may be before the verdict is abort", ge=0)


class SuperviseConfig(Section):
    hang_factor: float = setting(5.0, "a step hangs after this many times its usual time", gt=1)
    hang_floor_s: float = setting(60.0, "a step hangs after this time at the earliest", gt=0)
    start_timeout_s: float = setting(900.0, "maximum start time: imports, model, first compilation", gt=0)
    evaluate_timeout_s: float = setting(1800.0, "maximum time of a validation", gt=0)
    save_timeout_s: float = setting(600.0, "maximum time to save a checkpoint", gt=0)
    attempts: int = setting(3, "attempts without progress before giving up", gt=0)
    backoff_s: float = setting(
        5.0, "first pause after a device fault; doubled up to 300 s if faults come at different steps", gt=0
    )
    memory_share: float = setting(0.9, "maximum share of the device's memory to use", gt=0, le=1)
    checkpoint_every_s: float | None = setting(
        None, "seconds between checkpoints; default: from measured costs, by Young's rule", gt=0
    )
    allow: list[Literal["rank", "sample"]] = setting(
        [], "changes that recovery may make: rank (halve it), sample (skip rows)"
    )
    chunk_rows: int | None = setting(None, "finish all epochs on this many rows before the next", gt=0)


class CycleWatchConfig(Section):
    hours: float = setting(24.0, "hours for which a new champion is watched", ge=0, le=24 * 30)


class EmailConfig(Section):
    to: list[str] = Field(min_length=1, description="recipients")
    sender: str = Field(min_length=1, description="address of the sender")
    host: str = Field(min_length=1, description="mail server")
    port: int = Field(default=587, gt=0, lt=65536)
    security: Literal["starttls", "tls", "none"] = "starttls"
    user: str | None = setting(None, "user name on the mail server")
    password_variable: str | None = setting(None, "environment variable that holds the password", min_length=1)


class NotifyConfig(Section):
    """Notices of the cycle; only what is named here leaves the machine."""

    command: list[str] = setting([], "program and arguments; the notice is the last argument")
    webhook: str | None = setting(None, "URL that gets the notice as JSON", pattern="^https?://")
    email: EmailConfig | None = setting(None, "mail: host, sender, to, user, password_variable")


class CycleConfig(Section):
    """The loop that trains, judges and promotes by itself."""

    name: str | None = setting(None, "name of the release; required for a cycle")
    sources: list[str] = setting([], "sources to collect first, as for hivetune collect")
    after_rows: int = setting(200, "new groups of rows that start a cycle", gt=0)
    window: str | None = setting(None, "hours for long work, such as 22:00-06:00, or a cron line at which it starts")
    budget_hours: float | None = setting(None, "maximum hours of training in a cycle", gt=0)
    budget_kwh: float | None = setting(None, "maximum energy of training in a cycle, in kWh", gt=0)
    yield_to: Literal["serving", "nothing"] = setting(
        "serving", "serving: pause long work while requests or other programs use the machine"
    )
    replay: float = setting(0.5, "minimum share of old tokens if the budget is too small", ge=0, le=1)
    general: str | None = setting(None, "file of general rows; they get about 5 % of the tokens")
    start_from: Literal["base", "last"] = setting("base", "last: start each training from the champion's adapter")
    promote: Literal["auto", "ask"] = setting("auto", "ask: a person promotes a release that passed")
    watch: CycleWatchConfig = CycleWatchConfig()
    notify: NotifyConfig = NotifyConfig()


class RunConfig(Section):
    """One YAML file. The identity of a run is all of this but what `data/identity.py` leaves out."""

    model: str = Field(description="Hub id, folder, GGUF file, or smollm2-135m")
    data: DataConfig
    learn: LearnConfig = LearnConfig()
    method: Literal["lora", "qlora"] = setting(
        "lora", "qlora: base model in 4 bits; a quarter of the memory, slower, less exact"
    )
    lora: LoraConfig = LoraConfig()
    max_length: int = setting(2048, "maximum tokens of a row", ge=8, le=MAX_TOKENS_A_ROW)
    batch_size: int = setting(16, "examples per optimizer step, the effective batch size", gt=0)
    epochs: float = setting(3, "passes over the training rows", gt=0, le=100_000)
    max_steps: int | None = setting(None, "stop after this many optimizer steps", gt=0)
    learning_rate: float = setting(
        2e-4, "peak of the schedule; LoRA needs ten times the rate of full fine-tuning", gt=0
    )
    lr_schedule: Literal["cosine", "linear", "constant"] = setting(
        "cosine", "decay of the learning rate after the warm-up"
    )
    warmup: float = setting(0.05, "warm-up: below 1 a share of the steps, else their number", ge=0)
    weight_decay: float = setting(0.0, "decoupled weight decay, as in AdamW", ge=0)
    clip: float = setting(1.0, "maximum gradient norm; 0: no clipping", ge=0)
    validate_rows: int = setting(48, "maximum rows of a validation during training", gt=0)
    validate_every: int | None = setting(None, "steps between validations; default: ten validations a run", gt=0)
    patience: int | None = setting(3, "validations without improvement before stopping early; null: never", gt=0)
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto", "precision; auto: the fastest one, measured"
    )
    device: str = setting("auto", "auto, cpu, cuda, cuda:1", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    workers: Annotated[int | str | None, BeforeValidator(_known_workers)] = setting(
        None, "processes that share each step: a number, auto, or HOST:PORT of a cluster"
    )
    seed: int = setting(0, "seed of row order, first adapter and dropout")
    output: str | None = setting(None, "folder of the run; default: runs/NAME-HASH in the home")
    report_to: list[ReportTarget] = setting([], "send figures during training: tensorboard, mlflow, trackio, wandb")
    eval: EvalConfig = EvalConfig()
    gate: GateConfig = GateConfig()
    export: ExportConfig = ExportConfig()
    supervise: SuperviseConfig = SuperviseConfig()
    cycle: CycleConfig = CycleConfig()


@dataclass(frozen=True)
class Group:
    """Several stored settings that are one decision, and so one setting for people.

    What a run records (`config.resolved.yaml`, its identity) keeps the stored names, so that runs of earlier versions
    stay the same runs. Configs that use a stored name are still read.
    """

    meaning: str
    parts: Mapping[str, str]  # name of a part: stored setting
    listed: str | None = None  # the setting is a list of parts, and a part in it has this value


GROUPS = {
    "data.quotas": Group(
        "maximum rows per source and session, maximum bad rows per user, maximum share of synthetic rows",
        {"source": "data.quota_per_source", "session": "data.quota_per_session", "user": "learn.quota_per_user",
         "synthetic": "data.synthetic_share"},
    ),
    "data.on_private": Group(
        "what to do with secrets and personal data: redact, reject or keep",
        {"secrets": "data.on_secret", "personal": "data.on_personal"},
    ),
    "data.also_train": Group(
        "train these rows too: failed, untrusted, own_answers",
        {"failed": "data.on_failed", "untrusted": "data.on_untrusted", "own_answers": "data.on_own_answers"},
        "train",
    ),
    "data.do_not_train": Group(
        "leave out these parts of rows: tools, reasoning",
        {"tools": "data.on_tools", "reasoning": "data.on_reasoning"},
        "leave_out",
    ),
    "data.held_out": Group(
        "how rows are held out",
        {"by": "data.split", "together": "data.group_by"},
    ),
    "learn.stage2": Group(
        "training with bad answers",
        {"steps": "learn.steps", "rate": "learn.rate", "weight": "learn.weight", "beta": "learn.beta"},
    ),
    "eval.answers": Group(
        "length and number of answers",
        {"tokens": "eval.new_tokens", "parallel": "eval.slots", "timed": "eval.latency_prompts"},
    ),
    "gate.success": Group(
        "correct answers: minimum gain, minimum share",
        {"gain": "gate.success_gain", "share": "gate.least_success"},
    ),
    "gate.latency": Group(
        "time per answer: maximum ratio tuned / base, maximum seconds",
        {"ratio": "gate.latency_ratio", "seconds": "gate.most_latency_s"},
    ),
    "gate.memory": Group(
        "peak memory: maximum ratio tuned / base, maximum GB",
        {"ratio": "gate.memory_ratio", "gb": "gate.most_memory_gb"},
    ),
    "gate.preferred": Group(
        "answers that eval.judge prefers",
        {"gain": "gate.preferred_gain", "alone": "gate.judge_alone"},
    ),
    "gate.kept": Group(
        "minimum share of questions still answered correctly: frozen, general",
        {"frozen": "gate.least_kept", "general": "gate.least_general"},
    ),
    "gate.drift": Group(
        "change of answers: maximum factor in length, maximum rise of loops and refusals",
        {"length": "gate.length_drift", "loops": "gate.more_loops", "refusals": "gate.more_refusals"},
    ),
    "supervise.limits": Group(
        "limits of recovery: attempts and times",
        {"attempts": "supervise.attempts", "hang_factor": "supervise.hang_factor", "hang_s": "supervise.hang_floor_s",
         "start_s": "supervise.start_timeout_s", "evaluate_s": "supervise.evaluate_timeout_s",
         "save_s": "supervise.save_timeout_s", "pause_s": "supervise.backoff_s"},
    ),
    "cycle.budget": Group(
        "maximum hours and kWh of training in a cycle",
        {"hours": "cycle.budget_hours", "kwh": "cycle.budget_kwh"},
    ),
    "cycle.mix": Group(
        "rows to train besides the new ones",
        {"replay": "cycle.replay", "general": "cycle.general"},
    ),
}  # fmt: skip
FORMER_NAMES = {
    stored: f"{name}.{part}" for name, group in GROUPS.items() for part, stored in group.parts.items()
}  # of settings that are now part of a group
# Settings that a command or the cycle sets.
_INTERNAL = ("learn.stage", "gate.look")


# The setting that a section stands for if it is written as a text or a list.
_SHORT = {"data": "path", "learn": "use"}


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
    if path.is_file():  # not a pipe: `train <(...)` has no folder
        _resolve_paths(tree, path.parent)
    return _overridden(tree, overrides, spelled(path))


def override_config(config: RunConfig, overrides: Iterable[str], option: str = "--set") -> RunConfig:
    """Return `config` with each `a.b=c` of `overrides` applied. Raises UsageError, naming `option`."""
    return _overridden(config.model_dump(mode="json"), overrides, "config", option)


def parse_config(tree: Mapping[str, Any], where: str = "config", overrides: Iterable[str] = ()) -> RunConfig:
    """Return a config made from plain values, which stay as they are. Raises UsageError as `load_config` does."""
    return _overridden(_copied(tree), overrides, where)


def _copied(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the mapping and those inside of it as new ones, since overrides are written into them, and paths as text,
    as YAML has them.
    """
    return {key: _plain(value) for key, value in tree.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return _copied(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _overridden(tree: dict[str, Any], overrides: Iterable[str], where: str, option: str = "--set") -> RunConfig:
    """Raise UsageError naming the file or the option of each problem."""
    origins = {}
    _expand_short(tree)
    grouped = _expand_groups(tree, where)
    for override in overrides:
        origin = f"{option} {override}"
        key = _override(tree, override, origin)
        origins[key] = origin
        _expand_short(tree)
        expanded = _expand_groups(tree, origin, replace=True)
        origins |= dict.fromkeys(expanded, origin)
        grouped += expanded
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        meanings = {setting.key: setting.meaning for setting in (*known_settings(), *stored_settings())}
        names = {stored: FORMER_NAMES[stored] for stored in grouped}  # as they were written
        problems = dict.fromkeys(_explain(problem, where, origins, meanings, names) for problem in error.errors())
        raise UsageError("\n".join(problems), hint="list all settings: hivetune config") from None


def _expand_groups(tree: dict[str, Any], where: str, *, replace: bool = False) -> list[str]:
    """Replace each setting of GROUPS in `tree` by the stored settings, and return their names. Raises UsageError.

    `replace`: a group takes the place of stored settings, and a list of all that it could name; else both are refused.
    """
    expanded: list[str] = []
    for name, group in GROUPS.items():
        section, _, key = name.partition(".")
        if not isinstance(tree.get(section), dict) or key not in tree[section]:
            continue
        value, parts = tree[section].pop(key), ", ".join(group.parts)
        if group.listed is not None and isinstance(value, str | list):
            chosen = [value] if isinstance(value, str) else value
            value = {part: group.listed for part in chosen}
            for stored in group.parts.values() if replace else ():
                target, _, stored_key = stored.partition(".")
                if isinstance(tree.get(target), dict):
                    tree[target].pop(stored_key, None)
        elif not isinstance(value, dict) or group.listed is not None:
            kind = "a list" if group.listed is not None else "a mapping"
            raise UsageError(f"{where}: '{name}': must be {kind} of {parts}, got {value!r}")
        for part, of_part in value.items():
            if part not in group.parts:
                raise UsageError(f"{where}: '{name}': unknown part {part!r}", hint=f"it has: {parts}")
            target, _, stored = group.parts[part].partition(".")
            _expand_short(tree)
            if not replace and isinstance(tree.get(target), dict) and stored in tree[target]:
                hint = f"keep {name}: {target}.{stored} is its former name"
                raise UsageError(f"{where}: '{name}' and '{target}.{stored}' set the same", hint=hint)
            tree.setdefault(target, {})[stored] = of_part
            expanded.append(group.parts[part])
    return expanded


def written_settings(config: RunConfig) -> dict[str, Any]:
    """Return the settings that were set, under the names that people write."""
    tree = config.model_dump(mode="json", exclude_unset=True)
    for name, group in GROUPS.items():
        parts = {}
        for part, stored in group.parts.items():
            target, _, stored_key = stored.partition(".")
            if stored_key in tree.get(target, {}):
                parts[part] = tree[target].pop(stored_key)
        if parts:
            section, _, key = name.partition(".")
            named = [part for part, value in parts.items() if value == group.listed]
            tree.setdefault(section, {})[key] = parts if group.listed is None else named
    return {name: value for name, value in tree.items() if value != {}}


def former_names(path: Path) -> list[tuple[str, str]]:
    """Return (former name, present name) of each setting in the config `path` that is now part of a group."""
    tree = read_yaml(path)
    names = {}
    for former, present in FORMER_NAMES.items():
        group, _, part = present.rpartition(".")
        names[former] = present if GROUPS[group].listed is None else f"{group}: [{part}]"
    return [
        (former, present)
        for former, present in names.items()
        if isinstance(tree, dict)
        and isinstance(section := tree.get(former.partition(".")[0]), dict)
        and former.partition(".")[2] in section
    ]


def _resolve_paths(tree: dict[str, Any], folder: Path) -> None:
    """Make relative entries of `data.path` relative to the working directory; `folder` is that of the config."""
    _expand_short(tree)
    data = tree.get("data")
    if not isinstance(data, dict) or not isinstance(data.get("path"), str | list):
        return  # validation reports it
    entries = [data["path"]] if isinstance(data["path"], str) else data["path"]
    placed = [
        str(folder / entry) if isinstance(entry, str) and not _stays_as_it_is(entry) else entry for entry in entries
    ]
    data["path"] = placed[0] if isinstance(data["path"], str) else placed


def _stays_as_it_is(entry: str) -> bool:
    return entry in ("", "-", "store") or entry[0] == "~" or "://" in entry


def config_schema() -> dict[str, Any]:
    """Return the JSON Schema of the YAML file, with the short forms and groups that `load_config` accepts."""
    document = RunConfig.model_json_schema()
    sections = {
        name: document["$defs"][info.annotation.__name__]["properties"]
        for name, info in RunConfig.model_fields.items()
        if isinstance(info.annotation, type) and issubclass(info.annotation, Section)
    }
    for name, group in GROUPS.items():
        section, _, key = name.partition(".")
        parts = {}
        for part, stored in group.parts.items():
            target, _, stored_key = stored.partition(".")
            parts[part] = dict(sections[target][stored_key])
            sections[target][stored_key]["deprecated"] = True
        shape: dict[str, Any] = {"type": "object", "properties": parts, "additionalProperties": False}
        if group.listed is not None:
            shape = {"type": ["array", "string"], "items": {"enum": list(group.parts)}}
        sections[section][key] = {"description": group.meaning, **shape}
    for section in _SHORT:
        short = [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]
        document["properties"][section] = {"anyOf": [document["properties"][section], *short]}
    return document


def _expand_short(tree: dict[str, Any]) -> None:
    """Expand `data: faq.csv` to `data: {path: faq.csv}`, and `learn: [sft]` to `learn: {use: [sft]}`."""
    for section, key in _SHORT.items():
        if isinstance(tree.get(section), str | list):
            tree[section] = {key: tree[section]}


@dataclass(frozen=True)
class KnownSetting:
    """A setting as people see it: `default` as YAML, empty if it is required; `choices` if there are few."""

    key: str
    default: str
    meaning: str
    choices: tuple[str, ...] = ()


def known_settings() -> list[KnownSetting]:
    """Return the settings that people write, in the order of the file; each group stands for its parts."""
    stored = {setting.key: setting for setting in stored_settings()}
    shown: dict[str, KnownSetting] = {}
    for key, setting in stored.items():
        name = FORMER_NAMES.get(key, key).rpartition(".")[0] if key in FORMER_NAMES else key
        if name in GROUPS:
            shown.setdefault(name, _group_setting(name, stored))
        elif key.startswith("cycle.notify."):
            shown.setdefault("cycle.notify", KnownSetting("cycle.notify", "{}", _NOTIFY))
        elif key not in _INTERNAL:
            shown[key] = setting
    return list(shown.values())


_NOTIFY = "who is told of promotions and problems: command, webhook, email; nobody by default"


def _group_setting(name: str, stored: Mapping[str, KnownSetting]) -> KnownSetting:
    group = GROUPS[name]
    defaults = {part: json.loads(stored[key].default) for part, key in group.parts.items()}
    if group.listed is not None:
        return KnownSetting(name, "[]", group.meaning)
    text = ", ".join(f"{part}: {json.dumps(value)}" for part, value in defaults.items() if value is not None)
    return KnownSetting(name, f"{{{text}}}", group.meaning)


def stored_settings(section: type[BaseModel] = RunConfig, prefix: str = "") -> list[KnownSetting]:
    """Return every setting under the name by which `config.resolved.yaml` stores it."""
    settings = []
    for name, info in section.model_fields.items():
        kind = info.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            settings += stored_settings(kind, f"{prefix}{name}.")
        else:
            default = "" if info.is_required() else json.dumps(info.default)
            choices = ("true", "false") if kind is bool else get_args(kind) if get_origin(kind) is Literal else ()
            settings.append(KnownSetting(prefix + name, default, info.description or "", choices))
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
    value = parse_yaml(text, origin)
    if key in _SHORT and isinstance(value, str | list) and isinstance(tree.get(key), dict):
        tree, last = tree[key], _SHORT[key]  # the other settings of the section stay
    tree[last] = value
    return key


def _explain(
    problem: Mapping[str, Any],
    file: str,
    origins: Mapping[str, str],
    meanings: Mapping[str, str],
    names: Mapping[str, str],
) -> str:
    """Return a problem in words; `origins` maps the dotted name of a setting to the option that set it, `names` to
    its name for people.
    """
    key = _key_of(problem)
    where = next((origin for name, origin in origins.items() if f"{key}.".startswith(f"{name}.")), file)
    where = next((origin for name, origin in origins.items() if name.startswith(f"{key}.")), where)
    return f"{where}: {_refusal_text(problem, meanings, names)}"


# What pydantic refuses, in words for the person who wrote it.

MOST_SHOWN_CHARS = 80
_BRANCHES = ("str", "list[str]", "int")  # of a union, which pydantic names behind the setting


def _key_of(problem: Mapping[str, Any]) -> str:
    """Return the dotted name of the setting that a problem of `ValidationError.errors()` is about."""
    parts = [str(part) for part in problem["loc"]]
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] in _BRANCHES else parts)


def _refusal_text(problem: Mapping[str, Any], settings: Mapping[str, str], names: Mapping[str, str]) -> str:
    """Return one line on a refused setting. `settings`: each setting's dotted name and its meaning; `names`: its name
    for people, where that is another.
    """
    key, kind = _key_of(problem), problem["type"]
    if kind == "extra_forbidden":
        near = difflib.get_close_matches(key, settings, 1)
        near = near or [name for name in settings if name.rpartition(".")[2] == key.rpartition(".")[2]]
        return f"unknown setting '{key}'" + (f", did you mean '{FORMER_NAMES.get(near[0], near[0])}'?" if near else "")
    if kind == "missing":
        return f"'{key}' is missing"
    shown = repr(problem["input"])
    got = f"got {shown if len(shown) <= MOST_SHOWN_CHARS else shown[:MOST_SHOWN_CHARS] + '...'}"
    if kind == "model_type":
        below = next((name for name in settings if name.startswith(f"{key}.")), key)
        return f"'{key}': it has settings of its own, such as {below}, {got}"
    if key in settings and (kind == "string_pattern_mismatch" or len(problem["loc"]) > key.count(".") + 1):
        return f"'{key}': choose one of: {settings[key]}; {got}"
    return f"'{names.get(key, key)}': {problem['msg'].removeprefix('Value error, ')}, {got}"
