"""Every setting, once: names as users know them, defaults with their reasons in docs/config.md, and how a file is read.

What a setting *means* belongs to the room that uses it. Derived and measured values are not settings: they are chosen
by the plan and written to `config.resolved.yaml` of the run.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from hivetune.base.paths import spelled, what_to_do
from hivetune.base.refused import key_of, why_refused
from hivetune.base.yaml_file import parse_yaml, read_yaml
from hivetune.errors import UsageError

MOST_TOKENS_A_ROW = 1 << 24
ReportTarget = Literal["tensorboard", "mlflow", "trackio", "wandb"]


def _known_workers(value: Any) -> Any:
    address = isinstance(value, str) and re.fullmatch(r"[^\s:/]+:\d+", value)
    if value in (None, "auto") or address or (type(value) is int and 0 < value <= 64):
        return value
    raise ValueError("choose auto, a number from 1 to 64, or HOST:PORT of a cluster")


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False)


class DataConfig(Section):
    path: str | list[str] = Field(
        description="files, globs, folders (relative to the config's), '-' for standard input, or 'store'"
    )
    columns: dict[str, str] = Field(default={}, description="our field name: column in the rows")
    encoding: str | None = Field(default=None, description="of all files, as Python calls it; default: what they show")
    max_rejected: float = Field(
        default=0.2, ge=0, le=1, description="largest share of rejected rows; above it the data is refused"
    )
    validation: float = Field(default=0.1, ge=0, lt=1, description="share of rows held out to choose the best step")
    test: float = Field(default=0.1, ge=0, lt=1, description="share of rows held out for the verdict")
    split: Literal["content", "time"] = Field(
        default="content", description="which rows are held out: drawn by their content, or the newest"
    )
    group_by: Literal["auto", "session", "user", "none"] = Field(
        default="auto",
        description="kept on one side beside what says the same; auto: sessions and users that are not too large",
    )
    balance: Literal["none", "agent", "category"] = Field(
        default="none", description="equal rows per value, the rest set aside"
    )
    system_prompts: dict[str, str] = Field(default={}, description="agent: its system prompt, for rows that carry none")
    on_overlong: Literal["reject", "cut_turns", "cut"] = Field(default="reject", description="rows over max_length")
    on_failed: Literal["set_aside", "train"] = Field(default="set_aside", description="rows whose own success is false")
    on_untrusted: Literal["set_aside", "train"] = Field(default="set_aside", description="text from tools, web pages")
    on_own_answers: Literal["set_aside", "train"] = Field(
        default="set_aside", description="answers of a release that nobody rated up or checked"
    )
    on_tools: Literal["train", "leave_out"] = Field(default="train", description="calls of tools, and their results")
    on_reasoning: Literal["train", "leave_out"] = Field(default="train", description="thoughts before an answer")
    on_secret: Literal["redact", "reject", "keep"] = Field(default="redact", description="keys, tokens, passwords")
    on_personal: Literal["redact", "reject", "keep"] = Field(
        default="redact", description="mail addresses, phone, card and account numbers"
    )
    near_duplicates: float = Field(default=0.85, ge=0, le=1, description="likeness that makes duplicates; 0: off")
    quota_per_source: int | None = Field(default=None, gt=0, description="most rows from one source")
    quota_per_session: int | None = Field(default=None, gt=0, description="most rows from one session")
    synthetic_share: float = Field(default=0.5, ge=0, le=1, description="largest share of synthetic rows beside others")
    leave_out: str | None = Field(default=None, description="a file that names rows to set aside, and why")


class LearnConfig(Section):
    """Which lessons are learned from, and how hard bad answers push (docs/learn.md)."""

    use: list[Literal["sft", "corrections", "pairs", "failures"]] = Field(
        default=["sft", "corrections"],
        min_length=1,
        description="sft: good rows; corrections; pairs: a better and a worse answer; failures: bad answers alone",
    )
    stage: Literal[1, 2] = Field(default=1, description="2: from bad answers too, beginning with lora.start")
    steps: int = Field(default=40, gt=0, description="optimizer steps of stage 2")
    rate: float = Field(default=0.2, gt=0, le=1, description="share of learning_rate that stage 2 trains with")
    weight: float = Field(default=0.5, ge=0, le=1, description="most that a bad row pushes, beside 1 of a good row")
    beta: float = Field(default=5.0, gt=0, description="how soon a bad row pushes no more: after about 4 / beta nats")
    least_bad: int = Field(default=50, gt=0, description="with fewer bad rows there is no stage 2")
    quota_per_user: int = Field(default=100, gt=0, description="most bad rows from one user")


class LoraConfig(Section):
    r: int = Field(default=16, gt=0, le=1 << 16, description="rank: 8 for style and format, 16 to 32 for new skills")
    alpha: float = Field(default=32, gt=0, description="the update is scaled by alpha / r; twice the rank is usual")
    dropout: float = Field(default=0.0, ge=0, lt=1, description="share of the adapter's inputs left out at random")
    dropout_per: Literal["token", "row"] = Field(
        default="token",
        description="masks: token, prefixes are shared; row, each row has its own, none is shared",
    )
    target_modules: str | list[str] = Field(
        default="all-linear", description="'all-linear', names such as q_proj, or a pattern for whole names: '.*_proj'"
    )
    rslora: bool = Field(default=False, description="scale by alpha / sqrt(r) instead of alpha / r")
    start: str | None = Field(default=None, description="folder of an adapter of the same base to go on from")


class EvalConfig(Section):
    prompts: int = Field(default=64, gt=0, description="held-out rows that base and tuned model answer")
    new_tokens: int = Field(default=64, gt=0, description="longest answer, in tokens")
    slots: int = Field(default=8, gt=0, le=1024, description="answers written at the same time")
    baseline: str = Field(
        default="base",
        min_length=1,
        description="what the run is compared with: base, NAME@VERSION, a run, a .gguf file, URL#MODEL, a .yaml file",
    )
    latency_prompts: int = Field(default=50, gt=0, description="prompts that two sides answer alone, for their times")
    checker: dict[str, Any] | None = Field(default=None, description="decides the success of rows without their own")
    judge: str | None = Field(
        default=None, min_length=1, description="says which answer is better: URL#MODEL, a .gguf file, a release, base"
    )
    frozen: list[str] = Field(
        default=[],
        description="names of releases and files of rows that are never trained and that every candidate answers",
    )
    general: bool = Field(default=True, description="served sides answer the general questions that Hivetune brings")


class ExportConfig(Section):
    converter: str | None = Field(
        default=None, min_length=1, description="a checkout of llama.cpp whose converter writes GGUF; default: fetched"
    )


class GateConfig(Section):
    """Each `None` means: reported, not required."""

    loss_gain: float | None = Field(default=0.0, description="smallest gain of the tuned model, in nats per token")
    success_gain: float | None = Field(default=None, description="smallest gain in the share of prompts that succeed")
    latency_ratio: float | None = Field(default=1.5, gt=0, description="largest ratio of the answer time, tuned / base")
    memory_ratio: float | None = Field(default=1.5, gt=0, description="largest ratio of the peak memory, tuned / base")
    least_success: float | None = Field(
        default=None, gt=0, le=1, description="smallest share of prompts that the tuned model must answer rightly"
    )
    most_latency_s: float | None = Field(default=None, gt=0, description="longest mean time of a tuned answer")
    most_memory_gb: float | None = Field(default=None, gt=0, description="largest peak memory of the tuned model")
    preferred_gain: float | None = Field(
        default=None, ge=-1, le=1, description="smallest gain by eval.judge: share preferred less share of the baseline"
    )
    judge_alone: bool = Field(default=False, description="let eval.judge be the only evidence that a model is better")
    least_kept: float | None = Field(
        default=0.9,
        gt=0,
        le=1,
        description="smallest share of past wins and eval.frozen, once answered rightly, that the tuned model keeps",
    )
    least_general: float | None = Field(
        default=None, gt=0, le=1, description="smallest share of the baseline's right general answers that is kept"
    )
    length_drift: float | None = Field(
        default=None, ge=1, description="largest factor by which answers may get longer or shorter"
    )
    more_loops: float | None = Field(
        default=None, ge=0, le=1, description="largest increase of the share of answers that repeat themselves"
    )
    more_refusals: float | None = Field(
        default=None, ge=0, le=1, description="largest increase of the share of answers that refuse"
    )
    look: int | None = Field(
        default=None,
        gt=0,
        description="number of this candidate among those against one champion; later ones need more",
    )
    tolerance: float = Field(
        default=0.02, ge=0, description="how much worse a required metric may be before the verdict is abort"
    )


class SuperviseConfig(Section):
    hang_factor: float = Field(default=5.0, gt=1, description="a step this many times longer than usual is a hang")
    hang_floor_s: float = Field(default=60.0, gt=0, description="a step shorter than this is never a hang")
    start_timeout_s: float = Field(default=900.0, gt=0, description="imports, model load, first compile")
    evaluate_timeout_s: float = Field(default=1800.0, gt=0, description="longest validation")
    save_timeout_s: float = Field(default=600.0, gt=0, description="longest checkpoint")
    attempts: int = Field(default=3, gt=0, description="attempts without progress before giving up")
    backoff_s: float = Field(
        default=5.0, gt=0, description="first pause when a device faults at scattered steps; doubled up to 300 s"
    )
    memory_share: float = Field(default=0.9, gt=0, le=1, description="largest share of the device's memory to use")
    checkpoint_every_s: float | None = Field(default=None, gt=0, description="default: Young's rule of measured costs")
    allow: list[Literal["rank", "sample"]] = Field(
        default=[], description="changes of the training itself that recovery may make"
    )
    chunk_rows: int | None = Field(default=None, gt=0, description="finish all epochs on N rows before the next N")


class CycleWatchConfig(Section):
    hours: float = Field(default=24.0, ge=0, le=24 * 30, description="how long a new champion is watched")


class EmailConfig(Section):
    to: list[str] = Field(min_length=1, description="who gets it")
    sender: str = Field(min_length=1, description="the address that it comes from")
    host: str = Field(min_length=1, description="the mail server")
    port: int = Field(default=587, gt=0, lt=65536)
    security: Literal["starttls", "tls", "none"] = "starttls"
    user: str | None = Field(default=None, description="the name to log in with")
    password_variable: str | None = Field(
        default=None, min_length=1, description="the environment variable that holds the password"
    )


class NotifyConfig(Section):
    """Ways out of this machine; none is used that is not named here."""

    command: list[str] = Field(default=[], description="a program and its arguments; the sentence comes last")
    webhook: str | None = Field(default=None, pattern="^https?://", description="gets the notice as JSON")
    email: EmailConfig | None = Field(
        default=None, description="sends the notice: host, sender, to, and a password's variable"
    )


class CycleConfig(Section):
    """The loop that goes on without people."""

    name: str | None = Field(default=None, description="the release's name; only the cycle needs it")
    sources: list[str] = Field(default=[], description="collected before each look, as hivetune collect SRC...")
    after_rows: int = Field(default=200, gt=0, description="new usable groups of rows that open a cycle")
    window: str | None = Field(
        default=None, description="when long work may go on: 22:00-06:00, or a cron line at which it begins"
    )
    budget_hours: float | None = Field(default=None, gt=0, description="most hours of training of one cycle")
    budget_kwh: float | None = Field(default=None, gt=0, description="most energy of the training of one cycle")
    yield_to: Literal["serving", "nothing"] = Field(
        default="serving",
        description="serving: long work stands still for requests, and waits while others use the machine",
    )
    replay: float = Field(default=0.5, ge=0, le=1, description="share of old tokens when not all rows fit the budget")
    general: str | None = Field(default=None, description="a file of general rows, for about 5 % of the tokens")
    start_from: Literal["base", "last"] = Field(default="base", description="what a cycle's training begins with")
    promote: Literal["auto", "ask"] = Field(default="auto", description="ask: a person promotes what passed the gate")
    watch: CycleWatchConfig = CycleWatchConfig()
    notify: NotifyConfig = NotifyConfig()


class ExpertsConfig(Section):
    """Adapters of their own for single domains, beside the shared one."""

    shared: str | None = Field(
        default=None, description="the release whose champion is the shared adapter; default: cycle.name"
    )
    by: Literal["auto", "agent", "category", "system", "tools"] = Field(
        default="auto",
        description="what makes a domain; auto: the first of these that divides the rows (system: the system prompt)",
    )
    auto: bool = Field(default=False, description="the cycle looks for experts after each promotion")


class RunConfig(Section):
    """One YAML file. The identity of a run is all of this but what `data/identity.py` leaves out."""

    model: str = Field(description="Hub id, folder, GGUF file, or smollm2-135m")
    data: DataConfig
    learn: LearnConfig = LearnConfig()
    method: Literal["lora", "qlora"] = Field(
        default="lora", description="qlora: the frozen base in 4 bits, a quarter of its memory, slower and rounded"
    )
    lora: LoraConfig = LoraConfig()
    max_length: int = Field(default=2048, ge=8, le=MOST_TOKENS_A_ROW, description="tokens; longer: data.on_overlong")
    batch_size: int = Field(default=16, gt=0, description="examples per optimizer step: the effective batch")
    epochs: float = Field(default=3, gt=0, le=100_000, description="passes over the training rows")
    max_steps: int | None = Field(default=None, gt=0, description="stop after this many optimizer steps")
    learning_rate: float = Field(
        default=2e-4, gt=0, description="an adapter needs about ten times the rate of full fine-tuning"
    )
    lr_schedule: Literal["cosine", "linear", "constant"] = Field(
        default="cosine", description="how the rate goes to zero after the warm-up"
    )
    warmup: float = Field(default=0.05, ge=0, description="share of the steps below 1, number of steps from 1")
    weight_decay: float = Field(default=0.0, ge=0, description="decoupled, as in AdamW")
    clip: float = Field(default=1.0, ge=0, description="largest gradient norm; 0: no clipping")
    validate_rows: int = Field(default=48, gt=0, description="most rows of a validation; at the end all of them count")
    validate_every: int | None = Field(default=None, gt=0, description="steps; default: ten times a run")
    patience: int | None = Field(
        default=3, gt=0, description="validations without improvement before the run stops early; null: never"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="auto: by a measured GEMM"
    )
    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="auto, cpu, cuda, cuda:1")
    workers: Annotated[int | str | None, BeforeValidator(_known_workers)] = Field(
        default=None,
        description="processes that compute a step together, one a card; auto: as many as fit this machine; HOST:PORT: "
        "those of a cluster",
    )
    seed: int = Field(default=0, description="order of the rows, first adapter, dropout")
    output: str | None = Field(default=None, description="run folder; default: runs/NAME-HASH below the home")
    report_to: list[ReportTarget] = Field(
        default=[],
        description="tools that get the points of the run while it goes on: tensorboard, mlflow, trackio, wandb",
    )
    eval: EvalConfig = EvalConfig()
    gate: GateConfig = GateConfig()
    export: ExportConfig = ExportConfig()
    supervise: SuperviseConfig = SuperviseConfig()
    cycle: CycleConfig = CycleConfig()
    experts: ExpertsConfig = ExpertsConfig()


# What a section means that is a text or a list: the setting of it that is given so.
_SHORT = {"data": "path", "learn": "use"}


def load_config(path: Path, overrides: Iterable[str] = ()) -> RunConfig:
    """The config in `path` with each `a.b=c` of `overrides` applied.

    Relative `data.path` entries are relative to the folder of `path`; those of `overrides`, and model folders, to the
    working directory, as in a shell.
    Raises UsageError naming the file and the key, and for an unknown key the nearest known one.
    """
    try:
        tree = read_yaml(path)
    except OSError as error:
        hint = what_to_do(error, "give the path of a YAML config")
        raise UsageError(f"cannot read {spelled(path)}: {error.strerror}", hint=hint) from None
    if not isinstance(tree, dict):
        hint = "start with two lines: 'model: ...' and 'data: {path: ...}'"
        raise UsageError(f"{spelled(path)} has no settings", hint=hint)
    if path.is_file():  # not a pipe: `train <(...)` has no folder
        _place_beside(tree, path.parent)
    return _overridden(tree, overrides, spelled(path))


def override_config(config: RunConfig, overrides: Iterable[str], option: str = "--set") -> RunConfig:
    """`config` with each `a.b=c` of `overrides` applied. Raises UsageError as `load_config` does, naming `option`."""
    return _overridden(config.model_dump(mode="json"), overrides, "config", option)


def parse_config(tree: Mapping[str, Any], where: str = "config", overrides: Iterable[str] = ()) -> RunConfig:
    """A config from plain values. Raises UsageError as `load_config` does."""
    return _overridden(dict(tree), overrides, where)


def _overridden(tree: dict[str, Any], overrides: Iterable[str], where: str, option: str = "--set") -> RunConfig:
    """Raises UsageError naming for each problem the file, or the option that it came with."""
    given = {}
    _expand_short(tree)
    for override in overrides:
        said = f"{option} {override}"
        given[_override(tree, override, said)] = said
        _expand_short(tree)
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        told = dict.fromkeys(_explain(problem, where, given) for problem in error.errors())
        raise UsageError("\n".join(told), hint="every setting with its default and meaning: hivetune config") from None


def _place_beside(tree: dict[str, Any], folder: Path) -> None:
    """Relative entries of `data.path` as seen from the working directory, where `tree` was written in `folder`."""
    _expand_short(tree)
    data = tree.get("data")
    if not isinstance(data, dict) or not isinstance(data.get("path"), str | list):
        return  # validation says what is wrong
    entries = [data["path"]] if isinstance(data["path"], str) else data["path"]
    placed = [
        str(folder / entry) if isinstance(entry, str) and not _stays_as_it_is(entry) else entry for entry in entries
    ]
    data["path"] = placed[0] if isinstance(data["path"], str) else placed


def _stays_as_it_is(entry: str) -> bool:
    return entry in ("", "-", "store") or entry[0] == "~" or "://" in entry


def config_schema() -> dict[str, Any]:
    """The JSON Schema of the YAML file, with the short forms that `load_config` takes."""
    document = RunConfig.model_json_schema()
    for section in _SHORT:
        short = [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]
        document["properties"][section] = {"anyOf": [document["properties"][section], *short]}
    return document


def _expand_short(tree: dict[str, Any]) -> None:
    """`data: faq.csv` means `data: {path: faq.csv}`, `learn: [sft, pairs]` means `learn: {use: [sft, pairs]}`."""
    for section, key in _SHORT.items():
        if isinstance(tree.get(section), str | list):
            tree[section] = {key: tree[section]}


@dataclass(frozen=True)
class KnownSetting:
    """One setting as people see it: `default` as YAML, empty where it is required; `choices` where there are few."""

    key: str
    default: str
    meaning: str
    choices: tuple[str, ...] = ()


def known_settings(section: type[BaseModel] = RunConfig, prefix: str = "") -> list[KnownSetting]:
    """Every setting, in the order of the file."""
    found = []
    for name, info in section.model_fields.items():
        kind = info.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            found += known_settings(kind, f"{prefix}{name}.")
        else:
            default = "" if info.is_required() else json.dumps(info.default)
            choices = ("true", "false") if kind is bool else get_args(kind) if get_origin(kind) is Literal else ()
            found.append(KnownSetting(prefix + name, default, info.description or "", choices))
    return found


def _override(tree: dict[str, Any], override: str, said: str) -> str:
    """Sets one value in `tree`; its dotted name. `said`: the option with it."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise UsageError(f"{said}: not of the form a.b=c", hint="for example --set lora.r=8")
    *parents, last = key.split(".")
    for parent in parents:
        if tree.get(parent) is None:  # not set yet, or `null` in a config that is written out
            tree[parent] = {}
        child = tree[parent]
        if not isinstance(child, dict):
            raise UsageError(f"{said}: {parent} has no settings")
        tree = child
    try:
        tree[last] = parse_yaml(text, repr(text))
    except UsageError:
        raise UsageError(f"{said}: {text!r} is not a YAML value") from None
    return key


def _explain(problem: Mapping[str, Any], file: str, given: Mapping[str, str]) -> str:
    """`given`: dotted name to the option that set it."""
    key = key_of(problem)
    where = next((said for name, said in given.items() if f"{key}.".startswith(f"{name}.")), file)
    where = next((said for name, said in given.items() if name.startswith(f"{key}.")), where)
    return f"{where}: {why_refused(problem, {each.key: each.meaning for each in known_settings()})}"
