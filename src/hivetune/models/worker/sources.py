"""Sources of a model's files other than a folder: the Hugging Face Hub, and the package of the demo model.

Only this module uses the network for models, and only when fetching. HF_ENDPOINT, HF_TOKEN, HF_HOME,
HF_HUB_ETAG_TIMEOUT (10 s by default for the Hub's answer) and HF_HUB_OFFLINE mean the same as in huggingface_hub. If
the Hub does not answer, a model that is complete in huggingface_hub's cache is used.
"""

import importlib.util
import os
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from hivetune.base.paths import install_command, pip_install
from hivetune.errors import DoesNotFit, HivetuneError, MachineNotFit, UsageError

# The Hub.

_LOOPBACK = ("127.0.0.1", "::1", "localhost")
WANTED = ["*.safetensors", "*.json", "*.jinja"]


def download(name: str, *, offline: bool) -> tuple[str, str, Path]:
    """Return (Hub id, commit, folder in huggingface_hub's cache) of `ID` or `ID@revision`. Files in the cache are not
    fetched again.

    Raises UsageError (unknown, closed or without safetensors), MachineNotFit (no network), DoesNotFit (disk).
    """
    # These are read when huggingface_hub is imported. Switched off is what it adds by itself: the versions and tools
    # named in its user agent, and Xet, which asks further hosts for the parts of a file (HF_HUB_DISABLE_XET=0 brings it
    # back).
    os.environ["HF_HUB_OFFLINE"] = "1" if offline else "0"
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    os.environ.setdefault("HF_HUB_DISABLE_XET", "1")
    import huggingface_hub
    from huggingface_hub import constants
    from huggingface_hub.errors import LocalEntryNotFoundError

    _refuse_open_token()
    repository, _, revision = name.partition("@")
    get = partial(huggingface_hub.snapshot_download, repository, revision=revision or None, allow_patterns=WANTED)
    try:
        # snapshot_download asks too, but repeats a question that is not answered for more than a minute.
        info = huggingface_hub.HfApi().model_info(
            repository, revision=revision or None, files_metadata=True, timeout=constants.HF_HUB_ETAG_TIMEOUT
        )
        _check_files(name, {file.rfilename: file.size or 0 for file in info.siblings or []})
        folder = Path(get())
    except HivetuneError:
        raise
    except Exception as error:  # httpx, DNS and the Hub have many; each becomes one line
        explained = _explain(name, error)
        if isinstance(explained, UsageError):
            raise explained from error
        try:  # the Hub can't be reached: what lies whole in its cache is the model too
            folder = Path(get(local_files_only=True))
        except LocalEntryNotFoundError:
            raise explained from error
    return repository, folder.name, folder


def _refuse_open_token() -> None:
    from huggingface_hub import constants
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    address = urlsplit(constants.ENDPOINT)
    if "authorization" in build_hf_headers() and address.scheme != "https" and address.hostname not in _LOOPBACK:
        raise UsageError(
            f"HF_ENDPOINT is {constants.ENDPOINT}: without https others can read your token",
            hint="use https, or send no token: set HF_HUB_DISABLE_IMPLICIT_TOKEN=1",
        )


def _explain(name: str, error: Exception) -> HivetuneError:
    from huggingface_hub import constants, errors

    reason = (str(error).splitlines() or [type(error).__name__])[0]
    if isinstance(error, errors.OfflineModeIsEnabled):
        return MachineNotFit(
            f"model {name} is not in the cache, and HF_HUB_OFFLINE is set", hint="unset it, or give a folder"
        )
    if isinstance(error, errors.GatedRepoError):
        return UsageError(
            f"model {name} requires you to accept its licence",
            hint=f"accept it at {constants.ENDPOINT}/{name}, then set HF_TOKEN",
        )
    if isinstance(error, errors.RepositoryNotFoundError | errors.RevisionNotFoundError | errors.HFValidationError):
        return UsageError(
            f"model {name} is not on the Hub ({constants.ENDPOINT}), or HF_TOKEN may not see it",
            hint="check the spelling",
        )
    return MachineNotFit(
        f"model {name}: {constants.ENDPOINT} can't be reached: {reason}",
        hint="check the network or HF_ENDPOINT, or give a local folder or smollm2-135m",
    )


def _check_files(name: str, files: Mapping[str, int]) -> None:
    """Raise UsageError for a model without safetensors, DoesNotFit if the disk has no room. `files`: name -> bytes."""
    from huggingface_hub import constants

    sizes = [size_bytes for file, size_bytes in files.items() if file.endswith(".safetensors")]
    if not sizes:
        raise UsageError(
            f"model {name} has no *.safetensors on the Hub",
            hint="pickled weights can run code and are never fetched; use another repository of the model",
        )
    cache = Path(constants.HF_HUB_CACHE)
    folder = next(path for path in (cache, *cache.parents) if path.exists())
    free_bytes = shutil.disk_usage(folder).free
    if sum(sizes) > free_bytes:
        raise DoesNotFit(
            f"model {name} takes {sum(sizes) / 1e9:.1f} GB, {folder} has {free_bytes / 1e9:.1f} GB free",
            hint="make room, or set HF_HOME to another disk",
        )


# The demo model's package, which has it as GGUF.


def packaged_file(package: str, install: str) -> Path:
    """Return the GGUF file inside an installed package, which is not imported. Raises MachineNotFit with the command
    that installs it.
    """
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for file in sorted(Path(folder).rglob("*.gguf")):
            return file
    raise MachineNotFit(
        f"the package {package}, which has the model, is not installed", hint=f"{pip_install()} {install}"
    )


def take_gguf(file: Path, work: Path) -> None:
    """Write a transformers folder into `work` from SmolLM2's GGUF file: config, weights (in bfloat16), tokenizer and
    template. Raises MachineNotFit without the package gguf.
    """
    if importlib.util.find_spec("gguf") is None:
        raise MachineNotFit("the demo model needs the package gguf", hint=install_command("export"))
    import torch
    import transformers
    from tokenizers import pre_tokenizers

    here: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    # Not AutoTokenizer, which would read 100,000 words again: 3 s.
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(file.parent, **here)
    # transformers ignores the file's rule for splitting text into words, here single digits (tokenizer.ggml.pre is
    # smollm): other ids would be trained than served.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.bfloat16, **here)
    del model.config.quantization_config  # of the file, not of what is saved
    model.hf_quantizer = None
    model.save_pretrained(work, save_original_format=False)
    tokenizer.save_pretrained(work)
