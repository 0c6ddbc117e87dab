"""The server of the package xllamacpp as a program: `python -m hivetune.llama.wheel`, with llama-server's arguments."""

import argparse
import json
import os
import sys
import threading
import time

_LOGGED_AFTER_S = 0.5
# Of an argument, the attribute of the package's parameters.
_NUMBERS = {
    "--parallel": "n_parallel",
    "--ctx-size": "n_ctx",
    "--cache-ram": "cache_ram_mib",
    "--batch-size": "n_batch",
    "--n-gpu-layers": "n_gpu_layers",
}


def main() -> None:
    import xllamacpp

    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("--model", "--alias", "--host"):
        parser.add_argument(name, required=True)
    for name, attribute in _NUMBERS.items():
        parser.add_argument(name, dest=attribute, type=int)
    parser.add_argument("--threads", type=int)
    for name in ("--jinja", "--no-webui", "--no-slots", "--offline", "--no-warmup"):  # Jinja is the package's default
        parser.add_argument(name, action="store_true")
    parser.add_argument("--lora", action="append", default=[])
    parser.add_argument("--chat-template-kwargs", type=json.loads, default={})
    given = parser.parse_args()
    parameters = xllamacpp.CommonParams()
    parameters.model.path = given.model
    parameters.model_alias = {given.alias}
    parameters.hostnames = [given.host]
    parameters.api_keys = [os.environ["LLAMA_API_KEY"]]
    for attribute in _NUMBERS.values():
        if (number := getattr(given, attribute)) is not None:
            setattr(parameters, attribute, number)
    if given.threads is not None:
        parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = given.threads
    parameters.ui, parameters.endpoint_slots = not given.no_webui, not given.no_slots
    parameters.offline, parameters.warmup = given.offline, not given.no_warmup
    kwargs = {name: json.dumps(value) for name, value in given.chat_template_kwargs.items()}
    parameters.default_template_kwargs = kwargs
    parameters.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(path, 1.0) for path in given.lora]
    try:
        server = xllamacpp.Server(parameters)  # returns when the model is loaded; lives as long as it has a name
    except RuntimeError as error:
        # llama.cpp says why in a thread of its own, which a process that ends at once ends before it wrote: on busy
        # cores 3 of 240 logs were empty.
        time.sleep(_LOGGED_AFTER_S)
        sys.exit(f"xllamacpp: {error}")
    threading.Event().wait()
    del server


if __name__ == "__main__":
    main()
