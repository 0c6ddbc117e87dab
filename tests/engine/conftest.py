"""One thread for all tests of the engine."""

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Small products do not gain from two threads, and idle ones cost on a busy machine."""
    torch.set_num_threads(1)
