"""The settings: their names, defaults and meanings (docs/config.md), how a config is read, and what is refused in it.

Derived and measured values are not settings: the plan chooses them and writes them to `config.resolved.yaml`.
"""

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from hivetune.base.paths import path_hint, spelled
from hivetune.base.yaml_file import parse_yaml, read_yaml
from hivetune.errors import UsageError

MOST_SHOWN_CHARS = 80
_BRANCHES = ("str", "list[str]", "int")  # of a union, which pydantic names behind the setting


def key_of(problem: Mapping[str, Any]) -> str:
    """The dotted name of the setting that a problem of `ValidationError.errors()` is about."""
    parts = [str(part) for part in problem["loc"]]
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] in _BRANCHES else parts)


def refusal_text(problem: Mapping[str, Any], settings: Mapping[str, str]) -> str:
    """Return one line on a refused setting. `settings`: each setting's dotted name and its meaning."""
    key, kind = key_of(problem), problem["type"]
    if kind == "extra_forbidden":
        near = difflib.get_close_matches(key, settings, 1)
        near = near or [name for name in settings if name.rpartition(".")[2] == key.rpartition(".")[2]]
        return f"unknown setting '{key}'" + (f", did you mean '{near[0]}'?" if near else "")
    if kind == "missing":
        return f"'{key}' is missing"
    shown = repr(problem["input"])
    got = f"got {shown if len(shown) <= MOST_SHOWN_CHARS else shown[:MOST_SHOWN_CHARS] + '...'}"
    if kind == "model_type":
        return f"'{key}': it has settings of its own, such as {_first_below(key, settings)}, {got}"
    if key in settings and (kind == "string_pattern_mismatch" or len(problem["loc"]) > key.count(".") + 1):
        return f"'{key}': choose one of: {settings[key]}; {got}"
    return f"'{key}': {problem['msg'].removeprefix('Value error, ')}, {got}"


def _first_below(section: str, settings: Mapping[str, str]) -> str:
    return next((name for name in settings if name.startswith(f"{section}.")), section)


MAX_TOKENS_A_ROW = 1 << 24
ReportTarget = Literal["tensorboard", "mlflow", "trackio", "wandb"]


def _known_workers(value: Any) -> Any:
    address = isinstance(value, str) and re.fullmatch(r"[^\s:/]+:\d+", value)
    if value in (None, "auto") or address or (type(value) is int and 0 < value <= 64):
        return value
    raise ValueError("must be auto, a number from 1 to 64, or HOST:PORT of a cluster")


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False)


class DataConfig(Section):
    path: str | list[str] = Field(
        description="files, globs or folders of rows (relative to the config), '-' for standard input, or 'store'"
    )
    columns: dict[str, str] = Field(
        default={}, description="map of prompt, completion, ... to the columns of your rows"
    )
    encoding: str | None = Field(default=None, description="encoding of all files, such as cp1252; default: detected")
    max_rejected: float = Field(
        default=0.2, ge=0, le=1, description="maximum share of rejected rows; with more, the data is refused"
    )
    validation: float = Field(default=0.1, ge=0, lt=1, description="share of rows held out to choose the best step")
    test: float = Field(default=0.1, ge=0, lt=1, description="share of rows held out for the verdict")
    split: Literal["content", "time"] = Field(
        default="content", description="content: by a hash of the row; time: the newest"
    )
    group_by: Literal["auto", "session", "user", "none"] = Field(
        default="auto", description="rows that stay in one split; auto: small sessions and users"
    )
    balance: Literal["none", "agent", "category"] = Field(
        default="none", description="train the same number of rows of each agent or category"
    )
    system_prompts: dict[str, str] = Field(default={}, description="system prompt of each agent, for rows without one")
    on_overlong: Literal["reject", "cut_turns", "cut"] = Field(
        default="reject", description="rows longer than max_length: reject them, drop the last turns, or cut tokens"
    )
    on_failed: Literal["set_aside", "train"] = Field(default="set_aside", description="rows whose success is false")
    on_untrusted: Literal["set_aside", "train"] = Field(default="set_aside", description="text from tools or web pages")
    on_own_answers: Literal["set_aside", "train"] = Field(
        default="set_aside", description="answers of a release that nobody approved"
    )
    on_tools: Literal["train", "leave_out"] = Field(default="train", description="tool calls and their results")
    on_reasoning: Literal["train", "leave_out"] = Field(default="train", description="reasoning before an answer")
    on_secret: Literal["redact", "reject", "keep"] = Field(default="redact", description="keys, tokens, passwords")
    on_personal: Literal["redact", "reject", "keep"] = Field(
        default="redact", description="mail addresses, phone, card and account numbers"
    )
    near_duplicates: float = Field(
        default=0.85, ge=0, le=1, description="Jaccard similarity from which rows count as duplicates; 0: off"
    )
    quota_per_source: int | None = Field(default=None, gt=0, description="maximum rows from one source")
    quota_per_session: int | None = Field(default=None, gt=0, description="maximum rows from one session")
    synthetic_share: float = Field(default=0.5, ge=0, le=1, description="maximum share of synthetic rows")
    leave_out: str | None = Field(default=None, description="file with row ids to set aside and the reasons")


class LearnConfig(Section):
    """Settings for the rows to learn from and the weight of bad answers (docs/learn.md)."""

    use: list[Literal["sft", "corrections", "pairs", "failures"]] = Field(
        default=["sft", "corrections"],
        min_length=1,
        description="rows to learn from: sft (good rows), corrections, pairs (a better and a worse answer), failures",
    )
    stage: Literal[1, 2] = Field(default=1, description="2: learn from bad answers too, starting from lora.start")
    steps: int = Field(default=40, gt=0, description="optimizer steps of stage 2")
    rate: float = Field(default=0.2, gt=0, le=1, description="learning rate of stage 2, as a share of learning_rate")
    weight: float = Field(default=0.5, ge=0, le=1, description="maximum weight of a bad row; a good row has 1")
    beta: float = Field(default=5.0, gt=0, description="a bad row has no effect after about 4 / beta nats")
    least_bad: int = Field(default=50, gt=0, description="minimum bad rows for a stage 2")
    quota_per_user: int = Field(default=100, gt=0, description="maximum bad rows from one user")


class LoraConfig(Section):
    r: int = Field(default=16, gt=0, le=1 << 16, description="rank: 8 for style and format, 16 to 32 for new skills")
    alpha: float = Field(default=32, gt=0, description="the update is scaled by alpha / r; usually twice the rank")
    dropout: float = Field(
        default=0.0, ge=0, lt=1, description="dropout on the adapter's input; 0.05 to 0.1 for few rows"
    )
    dropout_per: Literal["token", "row"] = Field(
        default="token", description="token: compute shared prefixes once; row: each row has its own mask"
    )
    target_modules: str | list[str] = Field(
        default="all-linear", description="layers: all-linear, names such as q_proj, or a pattern such as '.*_proj'"
    )
    rslora: bool = Field(default=False, description="scale by alpha / sqrt(r) instead; for ranks above 32")
    start: str | None = Field(default=None, description="start from the adapter in this folder (same base model)")


class EvalConfig(Section):
    prompts: int = Field(default=64, gt=0, description="held-out rows that both models answer")
    new_tokens: int = Field(default=64, gt=0, description="maximum tokens of an answer")
    slots: int = Field(default=8, gt=0, le=1024, description="answers generated at the same time")
    baseline: str = Field(
        default="base",
        min_length=1,
        description="model to compare with: base, NAME@VERSION, a run, a .gguf file, URL#MODEL, or a .yaml file",
    )
    latency_prompts: int = Field(default=50, gt=0, description="prompts answered one at a time, to measure latency")
    checker: dict[str, Any] | None = Field(default=None, description="checker of answers, for rows without one")
    judge: str | None = Field(
        default=None, min_length=1, description="model that compares answers: URL#MODEL, a .gguf file, a release, base"
    )
    frozen: list[str] = Field(
        default=[], description="releases and files with questions to ask in every evaluation and never train"
    )
    general: bool = Field(default=True, description="also ask the general questions that ship with Hivetune")


class ExportConfig(Section):
    converter: str | None = Field(
        default=None,
        min_length=1,
        description="folder of a llama.cpp checkout that writes GGUF files; default: fetched",
    )


class GateConfig(Section):
    """Thresholds of the verdict; a metric whose threshold is null is reported, not required."""

    loss_gain: float | None = Field(default=0.0, description="minimum gain in nats per token, as a lower bound")
    success_gain: float | None = Field(default=None, description="minimum gain in the share of correct answers")
    latency_ratio: float | None = Field(default=1.5, gt=0, description="maximum time per answer, tuned / base")
    memory_ratio: float | None = Field(default=1.5, gt=0, description="maximum peak memory, tuned / base")
    least_success: float | None = Field(default=None, gt=0, le=1, description="minimum share of correct answers")
    most_latency_s: float | None = Field(default=None, gt=0, description="maximum mean time per answer")
    most_memory_gb: float | None = Field(default=None, gt=0, description="largest peak memory")
    preferred_gain: float | None = Field(
        default=None, ge=-1, le=1, description="minimum gain in the share of answers that eval.judge prefers"
    )
    judge_alone: bool = Field(default=False, description="accept these answers as the only evidence")
    least_kept: float | None = Field(
        default=0.9, gt=0, le=1, description="minimum share of frozen questions still answered correctly"
    )
    least_general: float | None = Field(
        default=None, gt=0, le=1, description="minimum share of general questions still answered correctly"
    )
    length_drift: float | None = Field(default=None, ge=1, description="maximum factor in the length of answers")
    more_loops: float | None = Field(default=None, ge=0, le=1, description="maximum rise of repetitive answers")
    more_refusals: float | None = Field(default=None, ge=0, le=1, description="maximum rise of refusals")
    look: int | None = Field(
        default=None, gt=0, description="number of candidates judged against the champion so far; a cycle sets it"
    )
    tolerance: float = Field(
        default=0.02, ge=0, description="how much worse a required metric may be before the verdict is abort"
    )


class SuperviseConfig(Section):
    hang_factor: float = Field(default=5.0, gt=1, description="a step hangs after this many times its usual time")
    hang_floor_s: float = Field(default=60.0, gt=0, description="a step hangs after this time at the earliest")
    start_timeout_s: float = Field(
        default=900.0, gt=0, description="maximum start time: imports, model, first compilation"
    )
    evaluate_timeout_s: float = Field(default=1800.0, gt=0, description="maximum time of a validation")
    save_timeout_s: float = Field(default=600.0, gt=0, description="maximum time to save a checkpoint")
    attempts: int = Field(default=3, gt=0, description="attempts without progress before giving up")
    backoff_s: float = Field(
        default=5.0,
        gt=0,
        description="first pause after a device fault; doubled up to 300 s if faults come at different steps",
    )
    memory_share: float = Field(default=0.9, gt=0, le=1, description="maximum share of the device's memory to use")
    checkpoint_every_s: float | None = Field(
        default=None, gt=0, description="seconds between checkpoints; default: from measured costs, by Young's rule"
    )
    allow: list[Literal["rank", "sample"]] = Field(
        default=[], description="changes that recovery may make: rank (halve it), sample (skip rows)"
    )
    chunk_rows: int | None = Field(
        default=None, gt=0, description="finish all epochs on this many rows before the next"
    )


class CycleWatchConfig(Section):
    hours: float = Field(default=24.0, ge=0, le=24 * 30, description="hours for which a new champion is watched")


class EmailConfig(Section):
    to: list[str] = Field(min_length=1, description="recipients")
    sender: str = Field(min_length=1, description="address of the sender")
    host: str = Field(min_length=1, description="mail server")
    port: int = Field(default=587, gt=0, lt=65536)
    security: Literal["starttls", "tls", "none"] = "starttls"
    user: str | None = Field(default=None, description="user name on the mail server")
    password_variable: str | None = Field(
        default=None, min_length=1, description="environment variable that holds the password"
    )


class NotifyConfig(Section):
    """Notices of the cycle; only what is named here leaves the machine."""

    command: list[str] = Field(default=[], description="program and arguments; the notice is the last argument")
    webhook: str | None = Field(default=None, pattern="^https?://", description="URL that gets the notice as JSON")
    email: EmailConfig | None = Field(default=None, description="mail: host, sender, to, user, password_variable")


class CycleConfig(Section):
    """The loop that trains, judges and promotes by itself."""

    name: str | None = Field(default=None, description="name of the release; required for a cycle")
    sources: list[str] = Field(default=[], description="sources to collect first, as for hivetune collect")
    after_rows: int = Field(default=200, gt=0, description="new groups of rows that start a cycle")
    window: str | None = Field(
        default=None, description="hours for long work, such as 22:00-06:00, or a cron line at which it starts"
    )
    budget_hours: float | None = Field(default=None, gt=0, description="maximum hours of training in a cycle")
    budget_kwh: float | None = Field(default=None, gt=0, description="maximum energy of training in a cycle, in kWh")
    yield_to: Literal["serving", "nothing"] = Field(
        default="serving", description="serving: pause long work while requests or other programs use the machine"
    )
    replay: float = Field(default=0.5, ge=0, le=1, description="minimum share of old tokens if the budget is too small")
    general: str | None = Field(default=None, description="file of general rows; they get about 5 % of the tokens")
    start_from: Literal["base", "last"] = Field(
        default="base", description="last: start each training from the champion's adapter"
    )
    promote: Literal["auto", "ask"] = Field(default="auto", description="ask: a person promotes a release that passed")
    watch: CycleWatchConfig = CycleWatchConfig()
    notify: NotifyConfig = NotifyConfig()


class ExpertsConfig(Section):
    """Specialists: adapters for single domains, besides the shared one."""

    shared: str | None = Field(default=None, description="release of the shared adapter; default: cycle.name")
    by: Literal["auto", "agent", "category", "system", "tools"] = Field(
        default="auto", description="field with the domain; auto: the first one that divides the rows"
    )
    auto: bool = Field(default=False, description="after each promotion, look for domains that need a specialist")


class RunConfig(Section):
    """One YAML file. The identity of a run is all of this but what `data/identity.py` leaves out."""

    model: str = Field(description="Hub id, folder, GGUF file, or smollm2-135m")
    data: DataConfig
    learn: LearnConfig = LearnConfig()
    method: Literal["lora", "qlora"] = Field(
        default="lora", description="qlora: base model in 4 bits; a quarter of the memory, slower, less exact"
    )
    lora: LoraConfig = LoraConfig()
    max_length: int = Field(default=2048, ge=8, le=MAX_TOKENS_A_ROW, description="maximum tokens of a row")
    batch_size: int = Field(default=16, gt=0, description="examples per optimizer step, the effective batch size")
    epochs: float = Field(default=3, gt=0, le=100_000, description="passes over the training rows")
    max_steps: int | None = Field(default=None, gt=0, description="stop after this many optimizer steps")
    learning_rate: float = Field(
        default=2e-4, gt=0, description="peak of the schedule; LoRA needs ten times the rate of full fine-tuning"
    )
    lr_schedule: Literal["cosine", "linear", "constant"] = Field(
        default="cosine", description="decay of the learning rate after the warm-up"
    )
    warmup: float = Field(default=0.05, ge=0, description="warm-up: below 1 a share of the steps, else their number")
    weight_decay: float = Field(default=0.0, ge=0, description="decoupled weight decay, as in AdamW")
    clip: float = Field(default=1.0, ge=0, description="maximum gradient norm; 0: no clipping")
    validate_rows: int = Field(default=48, gt=0, description="maximum rows of a validation during training")
    validate_every: int | None = Field(
        default=None, gt=0, description="steps between validations; default: ten validations a run"
    )
    patience: int | None = Field(
        default=3, gt=0, description="validations without improvement before stopping early; null: never"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="precision; auto: the fastest one, measured"
    )
    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="auto, cpu, cuda, cuda:1")
    workers: Annotated[int | str | None, BeforeValidator(_known_workers)] = Field(
        default=None, description="processes that share each step: a number, auto, or HOST:PORT of a cluster"
    )
    seed: int = Field(default=0, description="seed of row order, first adapter and dropout")
    output: str | None = Field(default=None, description="folder of the run; default: runs/NAME-HASH in the home")
    report_to: list[ReportTarget] = Field(
        default=[], description="send figures during training: tensorboard, mlflow, trackio, wandb"
    )
    eval: EvalConfig = EvalConfig()
    gate: GateConfig = GateConfig()
    export: ExportConfig = ExportConfig()
    supervise: SuperviseConfig = SuperviseConfig()
    cycle: CycleConfig = CycleConfig()
    experts: ExpertsConfig = ExpertsConfig()


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
        "training with bad answers, stage 2 of hivetune learn",
        {"steps": "learn.steps", "rate": "learn.rate", "weight": "learn.weight", "beta": "learn.beta",
         "min_bad": "learn.least_bad"},
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
    """Return a config made from plain values. Raises UsageError as `load_config` does."""
    return _overridden(dict(tree), overrides, where)


def _overridden(tree: dict[str, Any], overrides: Iterable[str], where: str, option: str = "--set") -> RunConfig:
    """Raise UsageError naming the file or the option of each problem."""
    origins = {}
    _expand_short(tree)
    _expand_groups(tree, where)
    for override in overrides:
        origin = f"{option} {override}"
        key = _override(tree, override, origin)
        origins[key] = origin
        _expand_short(tree)
        origins |= dict.fromkeys(_expand_groups(tree, origin), origin)
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        meanings = {setting.key: setting.meaning for setting in (*known_settings(), *stored_settings())}
        problems = dict.fromkeys(_explain(problem, where, origins, meanings) for problem in error.errors())
        raise UsageError("\n".join(problems), hint="list all settings: hivetune config") from None


def _expand_groups(tree: dict[str, Any], where: str) -> list[str]:
    """Replace each setting of GROUPS in `tree` by the stored settings, and return their names. Raises UsageError."""
    expanded: list[str] = []
    for name, group in GROUPS.items():
        section, _, key = name.partition(".")
        if not isinstance(tree.get(section), dict) or key not in tree[section]:
            continue
        value, parts = tree[section].pop(key), ", ".join(group.parts)
        if group.listed is not None and isinstance(value, str | list):
            chosen = [value] if isinstance(value, str) else value
            value = {part: group.listed for part in chosen}
        elif not isinstance(value, dict) or group.listed is not None:
            kind = "a list" if group.listed is not None else "a mapping"
            raise UsageError(f"{where}: '{name}': must be {kind} of {parts}, got {value!r}")
        for part, of_part in value.items():
            if part not in group.parts:
                raise UsageError(f"{where}: '{name}': unknown part {part!r}", hint=f"it has: {parts}")
            target, _, stored = group.parts[part].partition(".")
            _expand_short(tree)
            tree.setdefault(target, {})[stored] = of_part
            expanded.append(group.parts[part])
    return expanded


def former_names(path: Path) -> list[tuple[str, str]]:
    """Return (former name, present name) of each setting in the config `path` that is now part of a group."""
    tree = read_yaml(path)
    return [
        (former, present)
        for former, present in FORMER_NAMES.items()
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
    try:
        tree[last] = parse_yaml(text, repr(text))
    except UsageError:
        raise UsageError(f"{origin}: {text!r} is not a YAML value") from None
    return key


def _explain(problem: Mapping[str, Any], file: str, origins: Mapping[str, str], meanings: Mapping[str, str]) -> str:
    """Return a problem in words; `origins` maps the dotted name of a setting to the option that set it."""
    key = key_of(problem)
    where = next((origin for name, origin in origins.items() if f"{key}.".startswith(f"{name}.")), file)
    where = next((origin for name, origin in origins.items() if name.startswith(f"{key}.")), where)
    return f"{where}: {refusal_text(problem, meanings)}"
