"""Every causal family that the installed transformers knows, tried on a tiny random model: `docs/families.json`.

    python tools/families.py                 all of them; what was tried before with this transformers is kept
    python tools/families.py llama mixtral   only these, again
    python tools/families.py --page          write docs/families.md from the table

For each: prepared, path, two steps trained, loss and gradients against PEFT, resumed, merged, exported; or the
reason, in one line, why it is refused. Each family is tried in a process of its own, fifteen seconds at most for most.
"""

import importlib
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from served import apart, serve_family
from tiny_models import tiny_config

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "docs" / "families.json"
PAGE = ROOT / "docs" / "families.md"
LIMIT_S = 90.0
WORKS = {"gguf": "GGUF", "lora": "adapter", "served": "served"}


def main(arguments: Sequence[str]) -> int:
    if list(arguments) == ["--page"]:
        PAGE.write_text(page(json.loads(TABLE.read_text(encoding="utf-8"))), encoding="utf-8")
        return 0
    fill_table(TABLE, arguments)
    return 0


def fill_table(path: Path, wanted: Sequence[str] = ()) -> dict[str, Any]:
    """Fill the table in `path` with rows of `wanted`, or of all families that it lacks; write it after each row."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    warm_up()
    known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    rows = known.get("families", {}) if known.get("transformers") == transformers.__version__ else {}
    table: dict[str, Any] = {"schema": 1, "transformers": transformers.__version__, "families": rows}
    for kind in wanted or [kind for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if kind not in rows]:
        rows[kind] = try_apart(kind)
        print(kind, json.dumps(rows[kind]), file=sys.stderr, flush=True)
        table["families"] = rows = dict(sorted(rows.items()))
        path.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    return table


def warm_up() -> None:
    """Import what each child needs, once, before they fork. It would take ten seconds of each otherwise."""
    import torch

    for name in ("models.worker.prepare_model", "release.worker.merge", "train.worker.model.load"):
        importlib.import_module(f"hivetune.{name}")
    importlib.import_module("peft.tuners.lora")
    torch.set_num_threads(1)


def try_apart(kind: str) -> dict[str, Any]:
    """Return a row of the table from a process of its own, which may crash or hang."""
    started = time.monotonic()
    row = apart(try_family, kind, LIMIT_S) or {"build_failed": f"it crashed, or took more than {LIMIT_S:.0f} s"}
    return {**row, "seconds": round(time.monotonic() - started, 1)}


def try_family(kind: str, folder: Path) -> dict[str, Any]:
    """Return the row of one family: how far it came, and the reason why not further. Writes below `folder`."""
    row: dict[str, Any] = {}
    for station in (_build, _prepare, _train, _compare, _export):
        try:
            station(kind, folder, row)
        except Exception as error:  # noqa: BLE001 (the table is there to hold any)
            words = str(getattr(error, "message", "") or error).replace(str(folder), "").splitlines() or [""]
            if "is not causal" in words[0]:
                row["refused"] = "is not causal: an output depends on later tokens"
            if "refused" not in row:
                row[f"{station.__name__[1:]}_failed"] = f"{type(error).__name__}: {' '.join(words[:2])}"[:300]
            break
    return row


def _build(kind: str, folder: Path, row: dict[str, Any]) -> None:
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM

    from hivetune.errors import UsageError
    from hivetune.models.worker.strict import check_kind

    config = AutoConfig.for_model(kind)
    try:
        check_kind(config, "M")
    except UsageError as error:
        row["refused"] = error.message.partition(") ")[2].partition(";")[0]
        raise
    config = tiny_config(kind)
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    model.save_pretrained(folder / "model")
    (folder / "model/generation_config.json").unlink(missing_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2, **{letter: 3 + place for place, letter in enumerate(alphabet)}}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<pad>", "<s>", "</s>"])
    tokenizer.save(str(folder / "model/tokenizer.json"))
    (folder / "model/tokenizer_config.json").write_text('{"eos_token": "</s>", "pad_token": "<pad>"}')
    (folder / "model/chat_template.jinja").write_text(
        "{% for m in messages %}{{ m['role'] + ':' + m['content'] + '</s>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
    )


def _prepare(kind: str, folder: Path, row: dict[str, Any]) -> None:
    from hivetune.models.worker.prepare_model import prepare_model

    prepare_model(str(folder / "model"), folder / "prepared")
    row["prepared"] = True


def _load(folder: Path) -> Any:
    import torch

    from hivetune.config import LoraConfig
    from hivetune.train.worker.model.load import load_model

    return load_model(folder, LoraConfig(r=4, alpha=8), method="lora", dtype=torch.float32, device=torch.device("cpu"))


def documents() -> list[Any]:
    import torch

    from hivetune.train.worker.model.protocol import Document

    generator = torch.Generator().manual_seed(1)
    found = []
    for row, size in enumerate((24, 17, 30)):
        tokens = torch.randint(3, 250, (size,), generator=generator)
        trained = torch.rand(size, generator=generator) < 0.6
        trained[0] = False
        found.append(Document(row, tokens, trained))
    return found


def _train(kind: str, folder: Path, row: dict[str, Any]) -> None:
    """Train two steps, and the second again from the state after the first."""
    import torch

    from hivetune.train.worker.model.adapter import initialise, write_adapter
    from hivetune.train.worker.session import AdamW

    model, docs = _load(folder / "prepared"), documents()
    row["path"] = model.path
    initialise(model.adapter, 1)
    optimizer = AdamW(model.master_N, model.grad_N, weight_decay=0.0)
    losses, kept = [], []
    for step in (1, 2):
        model.grad_N.zero_()
        losses.append(float(model.backward(docs, 1 / 40)) / 40)
        optimizer.update(rate=0.02, number=step)
        kept.append([t.clone() for t in (model.master_N, optimizer.exp_avg_N, optimizer.exp_avg_sq_N)])
    row["losses"] = [round(loss, 4) for loss in losses]
    row["trained"] = losses[1] < losses[0]
    again = _load(folder / "prepared")
    optimizer = AdamW(again.master_N, again.grad_N, weight_decay=0.0)
    for target, value in zip((again.master_N, optimizer.exp_avg_N, optimizer.exp_avg_sq_N), kept[0], strict=True):
        target.copy_(value)
    again.backward(docs, 1 / 40)
    optimizer.update(rate=0.02, number=2)
    row["resumed"] = bool(torch.equal(again.master_N, kept[1][0]))
    from hivetune.config import LoraConfig

    for view in again.adapter.values():  # both halves away from zero
        view.add_(0.02 * torch.randn(view.shape, generator=torch.Generator().manual_seed(view.numel())))
    write_adapter(folder / "adapter", again.adapter, LoraConfig(r=4, alpha=8), str(folder / "prepared"), None)
    again.grad_N.zero_()
    row["tuned_loss"] = float(again.backward(docs, 1.0))
    torch.save((again.adapter, again.grad_N), folder / "gradient.pt")


def _compare(kind: str, folder: Path, row: dict[str, Any]) -> None:
    """Compare loss and gradients with the same adapter in PEFT."""
    import peft
    import torch
    from transformers import AutoModelForCausalLM

    from hivetune.train.worker.model.adapter import same_views

    base = AutoModelForCausalLM.from_pretrained(folder / "prepared", dtype=torch.float32)
    tuned = peft.PeftModel.from_pretrained(base, folder / "adapter", is_trainable=True).eval()
    leaves = {name.replace(".default", ""): leaf for name, leaf in tuned.named_parameters() if "lora_" in name}
    adapter, grad_N = torch.load(folder / "gradient.pt")
    differing = sorted(leaves.keys() ^ adapter.keys())
    assert not differing, f"PEFT has other modules: {differing[0]}"
    total = 0.0
    for document in documents():
        logits_LV = tuned(input_ids=document.tokens_L[None], use_cache=False).logits[0, :-1].float()
        target, trained = document.tokens_L[1:], document.trained_L[1:]
        nll = torch.nn.functional.cross_entropy(logits_LV[trained], target[trained], reduction="sum")
        nll.backward()
        total += float(nll.detach())
    found = same_views(grad_N, adapter)
    expected = {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in leaves.items()}
    difference = torch.stack([(found[name] - gradient).square().sum() for name, gradient in expected.items()]).sum()
    size = torch.stack([gradient.square().sum() for gradient in expected.values()]).sum()
    row["loss_error"] = float(f"{abs(total - row.pop('tuned_loss')) / abs(total):.1e}")
    row["gradient_error"] = float(f"{float((difference / size).sqrt()):.1e}")


def _export(kind: str, folder: Path, row: dict[str, Any]) -> None:
    import torch

    from hivetune.config import LoraConfig
    from hivetune.errors import UsageError
    from hivetune.process.child import Heartbeat
    from hivetune.release.worker.merge import merge
    from hivetune.train.worker.model.adapter import fill, read_adapter
    from hivetune.train.worker.model.general import load_general

    def load(model: Path, lora: LoraConfig) -> Any:
        return load_general(model, lora, method="lora", dtype=torch.float32, device=torch.device("cpu"), why="asked")

    try:
        merge(folder / "prepared", folder / "adapter", folder / "merged", Heartbeat(None))
    except UsageError:
        row["merged_error"] = None  # its files name tensors otherwise than its modules
    else:
        lora, tensors = read_adapter(folder / "adapter")
        tuned = load(folder / "prepared", lora)
        fill(tuned.adapter, tensors, "adapter")
        one, other = (model.nll(documents()) for model in (tuned, load(folder / "merged", lora)))
        row["merged_error"] = float(f"{float((one - other).abs().max() / one.abs().max()):.1e}")
    (folder / "served").mkdir()
    found = serve_family(kind, folder / "served")
    row |= {key: found.get(key, False) for key in WORKS}
    row |= {"effect": found["effect"]} if "effect" in found else {}


def verdict(row: Mapping[str, Any]) -> str:
    """Return `trains` (gradients equal PEFT's), `refused` (another kind of model), or what is wrong."""
    if "refused" in row:
        return "refused"
    failed = next((row[key] for key in row if key.endswith("_failed")), "")
    if failed:
        return failed
    if not (row["trained"] and row["resumed"]):
        return "a step or its repetition differs"
    if row["gradient_error"] > 1e-5 or row["loss_error"] > 1e-5 or (row["merged_error"] or 0) > 1e-4:
        return f"differs: gradients {row['gradient_error']}, loss {row['loss_error']}, merged {row['merged_error']}"
    return "trains"


def page(table: Mapping[str, Any]) -> str:
    """Return docs/families.md."""
    rows = table["families"]
    said = {kind: verdict(row) for kind, row in rows.items()}
    refused = [kind for kind, words in said.items() if words == "refused"]
    trains = [kind for kind, words in said.items() if words == "trains"]
    served = [kind for kind in trains if rows[kind].get("served")]
    merged = [kind for kind in trains if rows[kind]["merged_error"] is not None]
    others = len(rows) - len(refused)
    lines = [
        "# Families of models",
        "",
        f"`python tools/families.py` tries every causal family of transformers {table['transformers']} on a tiny",
        f"random model ([families.json](families.json)). Of {len(rows)} families, {len(refused)} are other kinds of",
        f"models, which are refused. Of the other {others}, {len(trains)} train with the loss and gradients of PEFT",
        f"and resume bit-for-bit, and {len(merged)} can be merged. llama.cpp serves {len(served)} of these as trained.",
        "",
        "*GGUF* means that llama.cpp's converter writes the model; *adapter*, that it writes a GGUF adapter for the",
        "base; *served*, that llama.cpp computes what was trained. `hivetune train` tests your own model before it",
        "starts. [families.json](families.json) has the errors of the others.",
        "",
        "On a base in `q8_0`, an adapter has 0.98 to 1.02 of its trained effect, in `f32` all of it. Experts and",
        "routers stay frozen. A model with a byte-level vocabulary that llama.cpp's script does not know is refused.",
        "For Ministral 3 and Granite 4 hybrids, llama.cpp serves merged models, but no adapters.",
        "",
    ]
    for path in ("fast", "general"):
        lines += [f"| {path} path | families |", "| --- | --- |"]
        alike: dict[str, list[str]] = {}
        for kind in trains:
            if (rows[kind].get("path") == "fast") == (path == "fast"):
                works = ", ".join(name for key, name in WORKS.items() if rows[kind].get(key))
                alike.setdefault(works, []).append(kind)
        for works in sorted(filter(None, alike), key=len, reverse=True):
            lines.append(f"| {works} | {', '.join(alike[works])} |")
        if "" in alike:
            lines.append(f"| no GGUF | {len(alike[''])} others |")
        lines.append("")
    failed = [
        f"{kind} ({words.partition(':')[0]})" for kind, words in said.items() if words not in ("refused", "trains")
    ]
    lines.append(f"Not trained: {'; '.join(failed)}.")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
