import pytest


@pytest.fixture(autouse=True)
def alone(no_forks: None) -> None:
    """These tests are about the start of processes."""
