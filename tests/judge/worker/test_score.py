"""Scores are what the models say: losses of both, and answers that equal transformers' own greedy ones."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from train.worker.model.test_experts import write_kind
from train.worker.model.test_general import write_other
from train.worker.models import documents, each_family, random_adapter, write_model
from train.worker.runs import learnable_rows, make_run, run_training
from transformers import AutoModelForCausalLM

from hivetune.config import LoraConfig
from hivetune.data.snapshot import open_snapshot
from hivetune.judge.worker import score
from hivetune.judge.worker.answers import Completion, answer_prompts, settle_module, split_last_answer
from hivetune.judge.worker.score import MAX_ROW, divergence_from_base
from hivetune.models.prepared import DESCRIPTION
from hivetune.process.child import Heartbeat
from hivetune.process.protocol import Generate, Score
from hivetune.release.worker.merge import merge
from hivetune.run.choices import Choices
from hivetune.train.worker.model.adapter import fill, read_adapter
from hivetune.train.worker.model.general import load_general, load_module
from hivetune.train.worker.model.load import load_model
from hivetune.train.worker.model.protocol import Document, read_documents

pytestmark = pytest.mark.slow  # models answer

PROMPTS = [[5, 9, 33, 12, 60, 7, 8], [40, 3, 17], [21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31], [9, 9, 4, 11], [50, 13]]


def write_answers(module: Any, slots: int, *, ends: set[int], new_tokens: int = 12) -> dict[int, Completion]:
    answers: dict[int, Completion] = {}
    answer_prompts(
        module,
        PROMPTS,
        ends=ends,
        new_tokens=new_tokens,
        slots=slots,
        cached=settle_module(module, PROMPTS),
        on_answer=lambda answer: answers.__setitem__(answer.prompt, answer),
    )
    assert sorted(answers) == list(range(len(PROMPTS)))
    return answers


@torch.no_grad()
def plain_answer(module: Any, prompt: list[int], ends: set[int], new_tokens: int = 12) -> tuple[list[int], bool]:
    """One whole forward pass per token, no cache: the definition of a greedy answer."""
    tokens = list(prompt)
    for _ in range(new_tokens):
        token = int(module(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax())
        if token in ends:
            return tokens[len(prompt) :], True
        tokens.append(token)
    return tokens[len(prompt) :], False


def module_of(folder: Path) -> Any:
    return load_module(folder, dtype=torch.float32, device=torch.device("cpu"))


@pytest.mark.parametrize("case", each_family("llama", "mistral-window"))
def test_answers_in_slots_equal_one_prompt_at_a_time(case: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path, case)
    expected = [plain_answer(module_of(folder), prompt, set()) for prompt in PROMPTS]
    ends = {expected[1][0][4]}  # a token that some answers come to write
    expected = [plain_answer(module_of(folder), prompt, ends) for prompt in PROMPTS]
    assert any(ended for _, ended in expected)
    for slots in (1, 2, 5):
        found = write_answers(module_of(folder), slots, ends=ends)
        assert [(found[i].tokens, found[i].ended) for i in range(len(PROMPTS))] == expected


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", "bloom", "mamba", "mixtral"])
def test_architectures_whose_cache_can_not_be_split_are_answered_all_the_same(kind: str, tmp_path: Path) -> None:
    folder = write_kind(tmp_path, kind) if kind == "mixtral" else write_other(tmp_path, kind)
    module = module_of(folder)
    expected = [plain_answer(module, prompt, {3}) for prompt in PROMPTS]
    found = write_answers(module, 2, ends={3})
    assert [(found[i].tokens, found[i].ended) for i in range(len(PROMPTS))] == expected
    if kind == "mamba":
        assert not settle_module(module, PROMPTS)


def test_losses_are_computed_without_transformers() -> None:
    """Its import takes 3.5 s of processor time, for each evaluation and each start of a worker."""
    script = "import sys, hivetune.judge.worker.score, hivetune.train.worker.loop; print('transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout == "False\n"


def test_the_prompt_of_a_row_ends_where_its_last_answer_begins() -> None:
    tokens = torch.arange(10)
    trained = torch.tensor([0, 0, 1, 1, 0, 0, 0, 1, 1, 0], dtype=torch.bool)
    assert split_last_answer(Document(0, tokens, trained)) == ([0, 1, 2, 3, 4, 5, 6], [7, 8])


@pytest.fixture(scope="module")
def trained(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    make_run(folder, learnable_rows(80), epochs=4)
    run_training(folder, tiny_model_folder)
    return folder


def run_score(folder: Path, model: Path, out: Path, *, adapter: bool = True, **task: Any) -> tuple[dict, list[dict]]:
    fields = {"rows": (9, 19, 29, 39, 49), "generate": Generate((9, 29, 59), new_tokens=8, slots=2), **task}
    out.mkdir(exist_ok=True)
    trained = folder / "run" if adapter else None
    result = score.main(Score(model, trained, folder / "snapshot", out / "scores.jsonl", **fields), Heartbeat(None))
    return result, [json.loads(line) for line in (out / "scores.jsonl").read_text().splitlines()]


def test_losses_and_answers_of_base_and_tuned(trained: Path, tiny_model_folder: Path, tmp_path: Path) -> None:
    result, lines = run_score(trained, tiny_model_folder, tmp_path / "score")
    documents = read_documents(open_snapshot(trained / "snapshot"), [9, 19, 29, 39, 49])
    lora, tensors = read_adapter(trained / "run")
    model = load_general(
        tiny_model_folder,
        lora,
        method="lora",
        dtype=torch.float32,
        device=torch.device("cpu"),
        choices=Choices(),
        why="",
    )
    fill(model.adapter, tensors, "run")
    for side in ("base", "tuned"):
        found = {line["row"]: line for line in lines if line["model"] == side and "nll" in line}
        expected = model.nll(documents, adapter=side == "tuned").tolist()
        assert [found[d.row]["nll"] for d in documents] == pytest.approx(expected, rel=1e-5)
        assert [found[d.row]["tokens"] for d in documents] == [int(d.trained_L.sum()) for d in documents]
        total = sum(line["tokens"] for line in found.values())
        assert result[side]["loss"] == pytest.approx(sum(expected) / total, rel=1e-5)
        assert result[side]["peak_memory_bytes"] > 1 << 20 and result[side]["tokens_per_second"] > 0
    assert result["tuned"]["loss"] < result["base"]["loss"]
    assert result["kl_to_base"]["rows"] == 5 and result["kl_to_base"]["nats_per_token"] > 0


def test_tuned_answers_are_those_of_the_merged_model(trained: Path, tiny_model_folder: Path, tmp_path: Path) -> None:
    _, lines = run_score(trained, tiny_model_folder, tmp_path / "score")
    merge(tiny_model_folder, trained / "run", tmp_path / "merged", "float32", Heartbeat(None))
    ends = {json.loads((tiny_model_folder / "hivetune.json").read_text())["eos_ids"][0]}
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tiny_model_folder / "tokenizer.json"))
    for side, folder in (("base", tiny_model_folder), ("tuned", tmp_path / "merged")):
        module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for line in (line for line in lines if line["model"] == side and "answer" in line):
            document = read_documents(open_snapshot(trained / "snapshot"), [line["row"]])[0]
            prompt, answer = split_last_answer(document)
            tokens, ended = plain_answer(module, prompt, ends | {answer[-1]}, 8)
            assert (line["answer"], line["ended"], line["new_tokens"]) == (tokenizer.decode(tokens), ended, len(tokens))
            assert line["seconds"] > 0


@pytest.mark.parametrize("room", [1 << 50, 0], ids=["both in memory", "one at a time"])
def test_both_models_take_turns_and_answer_as_if_alone(
    room: int, trained: Path, tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hivetune.judge.worker.answers._free_bytes", lambda device: room)
    wanted = Generate(tuple(range(0, 75, 6)), new_tokens=4, slots=2)
    result, lines = run_score(trained, tiny_model_folder, tmp_path / "score", generate=wanted)
    answers = [line for line in lines if line["event"] == "answer"]
    order = [(line["block"], line["model"]) for line in answers]
    changes = [turn for turn, before in zip(order, [None, *order], strict=False) if turn != before]
    sides = ("base", "tuned")
    assert changes == [(block, side) for block in range(13) for side in (sides if block % 2 == 0 else sides[::-1])]
    assert len(result["probes_s"]) == 26 and min(result["probes_s"]) > 0
    merge(tiny_model_folder, trained / "run", tmp_path / "merged", "float32", Heartbeat(None))
    shutil.copy(tiny_model_folder / DESCRIPTION, tmp_path / "merged")
    found: dict[str, dict[int, str]] = {side: {} for side in sides}
    for line in answers:
        found[line["model"]][line["row"]] = line["answer"]
    for side, model in (("base", tiny_model_folder), ("tuned", tmp_path / "merged")):
        _, alone = run_score(trained, model, tmp_path / side, adapter=False, dtype="float32", generate=wanted)
        assert found[side] == {line["row"]: line["answer"] for line in alone if "answer" in line}
    assert found["base"] != found["tuned"]


def test_a_task_that_broke_off_goes_on_where_it_was(trained: Path, tiny_model_folder: Path, tmp_path: Path) -> None:
    """Cut in the losses, in a turn and behind one: no line that is there is written again, and the sums are whole."""
    wanted = Generate((9, 19, 29, 39, 49, 59), new_tokens=4, slots=2)
    whole, lines = run_score(trained, tiny_model_folder, tmp_path / "whole", generate=wanted)
    turns = [number for number, line in enumerate(lines) if line["event"] == "turn"]
    for cut in (7, turns[3] + 2, turns[4] + 1, len(lines)):
        folder = tmp_path / str(cut)
        folder.mkdir()
        text = (tmp_path / "whole" / "scores.jsonl").read_text().splitlines(keepends=True)
        (folder / "scores.jsonl").write_text("".join(text[:cut]))
        result, found = run_score(trained, tiny_model_folder, folder, generate=wanted)
        assert found[:cut] == lines[:cut]
        for side in ("base", "tuned"):
            assert result[side]["loss"] == pytest.approx(whole[side]["loss"], rel=1e-6)
            assert (result[side]["tokens"], result[side]["answers"]) == (whole[side]["tokens"], 6)
            texts = [
                {line["row"]: line["answer"] for line in of if line.get("answer") is not None} for of in (found, lines)
            ]
            assert texts[0] == texts[1]
        turns_found = [(line["model"], line["block"]) for line in found if line["event"] == "turn"]
        assert len(turns_found) == len(set(turns_found)) == len(turns)
    assert result["path"] is None  # of the whole file nothing was computed


def test_the_waiting_model_is_not_counted_as_memory_of_the_other(
    trained: Path, tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hivetune.judge.worker.answers.peak_memory_bytes", lambda device: 1 << 30)
    result, _ = run_score(trained, tiny_model_folder, tmp_path / "score")
    _, tensors = read_adapter(trained / "run")
    widths = {name: tensor.shape for name, tensor in tensors.items()}
    adapted = sum(
        widths[name.replace("lora_A", "lora_B")][0] * shape[1] * 4 for name, shape in widths.items() if "lora_A" in name
    )
    assert result["base"]["peak_memory_bytes"] == result["tuned"]["peak_memory_bytes"] == (1 << 30) - adapted


def test_a_base_model_alone_is_scored_without_an_adapter(
    trained: Path, tiny_model_folder: Path, tmp_path: Path
) -> None:
    result, lines = run_score(trained, tiny_model_folder, tmp_path / "score", adapter=False, dtype="float32")
    assert "tuned" not in result and {line["model"] for line in lines} == {"base"}
    both, _ = run_score(trained, tiny_model_folder, tmp_path / "both")
    assert result["base"]["loss"] == pytest.approx(both["base"]["loss"], rel=1e-6)


def test_scores_use_the_precision_that_the_run_was_trained_in(
    trained: Path, tiny_model_folder: Path, tmp_path: Path
) -> None:
    result, _ = run_score(trained, tiny_model_folder, tmp_path / "score", dtype="auto")
    assert result["choices"]["dtype"] == "float32" and result["choices"]["threads"] == 1


def test_a_loss_that_is_not_finite_is_null(
    trained: Path, tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = score.load_model

    def load_poisoned(*args: Any, **kwargs: Any) -> Any:
        model = load(*args, **{**kwargs, "choices": replace(kwargs["choices"], path="general")})
        random_adapter(model)
        return model

    monkeypatch.setattr(score, "load_model", load_poisoned)

    def fill_poisoned(adapter: Any, tensors: Any, where: str) -> None:
        # Not q_proj: torch's SDPA on CPUs answers NaN queries with finite numbers.
        adapter[next(name for name in adapter if "down_proj" in name)].fill_(torch.nan)

    monkeypatch.setattr(score, "fill", fill_poisoned)
    result, lines = run_score(
        trained, tiny_model_folder, tmp_path / "score", generate=Generate((), new_tokens=8, slots=2)
    )
    assert [line["nll"] for line in lines if line["model"] == "tuned"] == [None] * 5
    assert result["tuned"]["loss"] is None and result["base"]["loss"] is not None


def test_the_divergence_from_the_base_is_that_of_the_probabilities(tmp_path: Path) -> None:
    """By torch's own kl_div on transformers' logits; the same on both paths, 0 for an adapter of zeros."""
    folder = write_model(tmp_path)
    model = load_model(folder, LoraConfig(r=4), method="lora", dtype=torch.float32, device=torch.device("cpu"))
    given = documents()  # two of them without a target
    whole = divergence_from_base(model, given, Heartbeat(None))
    assert whole is not None and whole["nats_per_token"] == pytest.approx(0, abs=1e-6)
    random_adapter(model)
    whole = divergence_from_base(model, given, Heartbeat(None))
    assert whole is not None
    expected, tokens = 0.0, 0
    for document in given:
        ids = document.tokens_L.tolist()
        places = document.trained_L.nonzero()[:, 0] - 1
        tuned, base = (torch.log_softmax(model.logits(ids, adapter=on)[places], -1) for on in (True, False))
        expected += float(torch.nn.functional.kl_div(base, tuned, reduction="sum", log_target=True))
        tokens += len(places)
        assert torch.allclose(
            model.logits(ids, adapter=False), module_of(folder)(input_ids=torch.tensor([ids])).logits[0], atol=1e-3
        )
    assert whole == {
        "nats_per_token": pytest.approx(expected / tokens, rel=1e-4),
        "tokens": tokens,
        "rows": len(given) - 2,
    }
    general = load_general(
        folder,
        LoraConfig(r=4),
        method="lora",
        dtype=torch.float32,
        device=torch.device("cpu"),
        choices=Choices(),
        why="",
    )
    for name, tensor in model.adapter.items():
        general.adapter[name].copy_(tensor)
    again = divergence_from_base(general, given, Heartbeat(None))
    assert again is not None and again["nats_per_token"] == pytest.approx(whole["nats_per_token"], rel=1e-3)


def test_rows_that_are_too_long_and_too_many_are_left_out_of_the_divergence(tmp_path: Path) -> None:
    model = load_model(
        write_model(tmp_path), LoraConfig(r=4), method="lora", dtype=torch.float32, device=torch.device("cpu")
    )
    tokens, trained = torch.ones(MAX_ROW + 1, dtype=torch.int64), torch.ones(MAX_ROW + 1, dtype=torch.bool)
    assert divergence_from_base(model, [Document(0, tokens, trained)], Heartbeat(None)) is None
    short = Document(0, tokens[:3], torch.tensor([False, True, True]))
    found = divergence_from_base(model, [short] * 70, Heartbeat(None))
    assert found == {"nats_per_token": pytest.approx(0, abs=1e-6), "tokens": 48, "rows": 24}
