"""One thread for all tests of the engine, and NaN in all memory that it has not written yet."""

import pytest
import torch

from hivetune.train.worker.model import memory


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Small products do not gain from two threads, and idle ones cost on a busy machine."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read before it is written is seen on any machine, in children too."""
    monkeypatch.setenv(memory.POISON_VARIABLE, "1")
    monkeypatch.setattr(memory, "POISONED", True)
