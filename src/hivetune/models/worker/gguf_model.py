"""Turns a GGUF file into a transformers folder: weights de-quantized to bf16, and a tokenizer with the right word
splitting.

transformers reads the tensors and ignores the file's rule for splitting text into words (`tokenizer.ggml.pre`). The
rule is set here, and an unknown one is refused: other token ids would be trained than served.
"""

import importlib.util
from pathlib import Path
from typing import Any

from hivetune.base.paths import install_command, pip_install
from hivetune.errors import MachineNotFit, UsageError
from hivetune.models.gguf_header import read_header
from hivetune.models.prepared import TEMPLATE

# The patterns of Qwen 2 and 3 and of Llama 3, from their tokenizer.json.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
# tokenizer.ggml.pre: how numbers are split; "whole" is ByteLevel's own pattern.
WORD_SPLITS = {
    "gpt-2": "whole",
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), "digits"),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), _WORDS % "{1,3}"),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _WORDS % ""),
}


def packaged_file(package: str, install: str) -> Path:
    """Return the GGUF file inside an installed package, which is not imported. Raises MachineNotFit with the line
    that installs it."""
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for file in sorted(Path(folder).rglob("*.gguf")):
            return file
    raise MachineNotFit(
        f"the package {package}, which has the model, is not installed", hint=f"{pip_install()} {install}"
    )


def take_gguf(file: Path, work: Path) -> None:
    """Write config, weights, tokenizer and template of `file` into `work`. Raises UsageError, MachineNotFit."""
    if importlib.util.find_spec("gguf") is None:
        raise MachineNotFit("GGUF files need the package gguf", hint=install_command("export"))
    settings = read_header(file).settings
    import torch
    import transformers
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES, tokenizer_class_from_name

    from hivetune.models.worker.strict import refuse_invented

    here: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    try:
        config = transformers.AutoConfig.from_pretrained(file.parent, **here)
        # The class that AutoTokenizer chooses by the config. AutoTokenizer would read 100,000 words again: 3 s.
        of_kind = tokenizer_class_from_name(TOKENIZER_MAPPING_NAMES.get(config.model_type) or "PreTrainedTokenizerFast")
        tokenizer = of_kind.from_pretrained(file.parent, **here)
        model, loading_info = transformers.AutoModelForCausalLM.from_pretrained(
            file.parent, config=config, dtype=torch.bfloat16, output_loading_info=True, **here
        )
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, NotImplementedError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UsageError(
            f"{file}: transformers cannot read this GGUF file: {reason}", hint="use the model's safetensors"
        ) from error
    refuse_invented(loading_info, str(file))
    kind = settings.get("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer.backend_tokenizer.pre_tokenizer = _splitter(str(settings.get("tokenizer.ggml.pre", "")), file)
    elif kind != "llama":
        raise UsageError(f"{file}: unsupported tokenizer {kind!r}")
    del model.config.quantization_config  # of the file, not of what is saved
    model.hf_quantizer = None
    model.save_pretrained(work, save_original_format=False)
    tokenizer.save_pretrained(work)
    if template := settings.get("tokenizer.chat_template"):
        (work / TEMPLATE).write_text(template, encoding="utf-8")


def _splitter(pre: str, file: Path) -> Any:
    from tokenizers import Regex, pre_tokenizers

    split = WORD_SPLITS.get(pre)
    if split is None:
        raise UsageError(
            f"{file}: unsupported pre-tokenizer {pre or '(not named)'}",
            hint="use the model's Hub id or folder instead",
        )
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split in ("whole", "digits"))
    if split == "whole":
        return to_bytes
    digits = pre_tokenizers.Digits(individual_digits=True)
    splitter = digits if split == "digits" else pre_tokenizers.Split(Regex(split), behavior="isolated")
    return pre_tokenizers.Sequence([splitter, to_bytes])
