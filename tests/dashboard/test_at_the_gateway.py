"""The dashboard behind a running gateway: it has its own token, and no open page delays the end."""

import signal
import time
from contextlib import closing
from pathlib import Path

import httpx2
import pytest
from serve.hive import add_release, gateway, stub_on_path

from hivetune.base.database import open_database
from hivetune.dashboard.page import cookie_name, cookie_value, dashboard_token, form_token
from hivetune.release.registry import find
from hivetune.serve.guard import cookie_of_home, make_client
from hivetune.serve.run import is_loopback


@pytest.mark.slow
def test_a_client_of_the_api_sees_no_dashboard_and_its_owner_does(
    own_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", stub_on_path(tmp_path))
    add_release(tmp_path, "helpdesk", 1, champion=True)
    second = add_release(tmp_path, "helpdesk", 2)
    token = dashboard_token()
    with closing(open_database()) as database:
        client_token = make_client(database, "app")
    promotion = "/dashboard/releases/helpdesk/2/promote"
    with gateway(tmp_path / "log", token=client_token) as running:
        signed_in = {"Cookie": f"{cookie_name()}={cookie_value()}"}
        with httpx2.Client(base_url=running.url, timeout=30) as client:
            for headers in (
                {"Authorization": f"Bearer {client_token}"},
                {"Cookie": f"{cookie_of_home()}={client_token}"},
                {"Cookie": f"{cookie_name()}={client_token}"},
            ):
                refused = client.get("/dashboard/", headers=headers)
                assert (refused.status_code, refused.headers["location"]) == (303, "/dashboard/login")
                form = {"token": form_token(promotion.removeprefix("/dashboard"))}
                assert client.post(promotion, headers=headers, data=form).status_code == 401
            assert client.get("/v1/models", headers={"Authorization": f"Bearer {token}"}).status_code == 401
            assert client.get("/v1/models", headers=signed_in).status_code == 401
            assert "served by process" in client.get("/dashboard/", headers=signed_in).text
            assert client.post(promotion, headers=signed_in, data=form).status_code == 200
            with closing(open_database()) as database:
                assert find(database, "helpdesk").label == second
            assert "served by process" in client.get("/dashboard/", headers=signed_in).text
            began = time.monotonic()
            running.process.send_signal(signal.SIGTERM)  # while the connection of a page is open
            running.process.wait(30)
            assert time.monotonic() - began < 8  # uvicorn waits 10 s for what goes on


def test_a_gateway_that_others_can_reach_has_no_dashboard(own_home: Path) -> None:
    for host, shown in (("127.0.0.1", 1), ("localhost", 1), ("::1", 1), ("0.0.0.0", 0), ("192.168.1.7", 0)):
        assert is_loopback(host) == bool(shown)
