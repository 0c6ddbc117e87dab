"""Gateways that several files of tests share: one a session with llama.cpp, one with a stand-in for it."""

from collections.abc import Iterator

import pytest
from serve.hive import Running, own_gateway


@pytest.fixture(scope="session")
def real_gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with own_gateway(tmp_path_factory.mktemp("served"), releases=2) as running:
        yield running


@pytest.fixture(scope="session")
def stub_gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with own_gateway(tmp_path_factory.mktemp("stub"), stub=True) as running:
        yield running


@pytest.fixture
def served(real_gateway: Running, monkeypatch: pytest.MonkeyPatch) -> Running:
    """A gateway with helpdesk@1, its champion, and helpdesk@2 of a tiny model. The test reads its store."""
    monkeypatch.setenv("HIVETUNE_HOME", str(real_gateway.log.parent / "home"))
    return real_gateway


@pytest.fixture
def stubbed(stub_gateway: Running, monkeypatch: pytest.MonkeyPatch) -> Running:
    """A gateway with helpdesk@1, for which a stand-in answers. The test reads its store."""
    monkeypatch.setenv("HIVETUNE_HOME", str(stub_gateway.log.parent / "home"))
    return stub_gateway
