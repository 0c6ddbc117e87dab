"""GGUF files written in a fork of this process, which has torch and transformers imported already: a child of its own
takes three seconds of processor time for that."""

import multiprocessing
import sys
from pathlib import Path

import torch

from hivetune.process.child import Heartbeat
from hivetune.process.protocol import WriteGguf
from hivetune.release.gguf import find_converter
from hivetune.release.worker import to_gguf


def write_gguf_model(model: Path, adapter: Path | None, quant: str, file: Path) -> Path:
    return _written(WriteGguf(model, adapter, file, quant, find_converter()))


def write_gguf_adapter(model: Path, adapter: Path, file: Path) -> Path:
    return _written(WriteGguf(model, adapter, file, None, find_converter()))


def _written(task: WriteGguf) -> Path:
    process = multiprocessing.get_context("fork").Process(target=_write, args=(task,))
    process.start()
    process.join()
    assert process.exitcode == 0
    return task.file


def _write(task: WriteGguf) -> None:
    torch.set_num_threads(1)  # the threads of the parent are not there
    for name in [name for name in sys.modules if name.partition(".")[0] == "gguf"]:
        del sys.modules[name]  # the one of pip, which is older than the converter's own
    to_gguf.main(task, Heartbeat(None))
