"""Access: every route of the dashboard, alone and behind the gateway, asked by strangers and by its owner."""

import asyncio
import re
import signal
import urllib.parse
from collections.abc import Iterator
from contextlib import closing
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import httpx2
import pytest
from dashboard.shown import HOSTILE, SNAPSHOT, evaluation, everything, supervisor
from starlette.routing import Mount, Route

from hivetune.base.database import open_database
from hivetune.base.disk import home, write_json
from hivetune.base.journal import Journal
from hivetune.dashboard.acts import FORMS
from hivetune.dashboard.app import MAX_FORM_BYTES, dashboard_addition, guarded_dashboard
from hivetune.dashboard.page import cookie_name, cookie_value, dashboard_token, form_token
from hivetune.dashboard.pages import PAGES
from hivetune.dashboard.watched import run_id
from hivetune.release.registry import find
from hivetune.run.folder import EVENTS
from hivetune.serve.api import Gateway
from hivetune.serve.guard import Guard, cookie_of_home, make_client
from hivetune.serve.route import Wanted
from hivetune.serve.run import GatewaySettings, is_loopback, listen_on
from hivetune.serve.run import guarded as guarded_gateway
from hivetune.serve.servers import Keeper
from hivetune.serve.watch import Watch

HERE = "http://127.0.0.1"
Guarded = tuple[Any, str]  # the application as it is served, and its origin


@pytest.fixture
def guarded(own_home: Path) -> Iterator[Guarded]:
    dashboard_token()
    with closing(listen_on("127.0.0.1", 0)) as listening:
        app = guarded_dashboard(listening)
        assert isinstance(app, Guard)
        yield app, f"{HERE}:{listening.getsockname()[1]}"


def ask(guarded: Guarded, path: str, method: str = "GET", **more: Any) -> httpx2.Response:
    app, origin = guarded

    async def sent() -> httpx2.Response:
        transport = httpx2.ASGITransport(app=app)
        async with httpx2.AsyncClient(transport=transport, base_url=origin) as client:
            return await client.request(method, path, **more)

    return asyncio.run(sent())


def owner() -> dict[str, str]:
    return {"Authorization": f"Bearer {dashboard_token()}"}


def shown(guarded: Guarded, path: str, status: int = 200, method: str = "GET", **more: Any) -> str:
    """Return the text of a page that its owner asks for."""
    answer = ask(guarded, f"/dashboard{path}", method, headers=owner(), **more)
    assert answer.status_code == status, (path, answer.text)
    return answer.text


def post(guarded: Guarded, path: str, status: int = 200, **fields: str) -> str:
    return shown(guarded, path, status, "POST", data={"token": form_token(path), **fields})


def routes_of(app: Any, below: str = "") -> Iterator[tuple[str, str]]:
    """Yield example and method of everything that an application answers, mounted ones included."""
    for route in app.routes:
        if isinstance(route, Mount):
            yield from routes_of(route.app, below + route.path)
        else:
            assert isinstance(route, Route), f"a route of a kind that this test does not know: {route}"
            for method in (route.methods or set()) - {"HEAD"}:
                yield below + example(route.path), method


def example(path: str) -> str:
    return re.sub(r"\{(\w+)(:\w+)?\}", lambda found: "1" if found[2] == ":int" else "x", path)


def test_every_route_is_behind_the_guard(guarded: Guarded) -> None:
    """There is no list to forget a path in: every route is asked, with every method."""
    found = list(routes_of(guarded[0].app))
    assert len(found) > len(PAGES) + 2 * len(FORMS)
    port = guarded[1].rpartition(":")[2]
    for path, method in found:
        for host in ("evil.example", f"evil.example:{port}", "127.0.0.1", f"127.0.0.1:{int(port) ^ 1}", ""):
            assert ask(guarded, path, method, headers={**owner(), "Host": host}).status_code == 421, (path, host)
        for origin in ("http://evil.example", "null", "http://127.0.0.1:1", f"http://evil.example:{port}"):
            assert ask(guarded, path, method, headers={**owner(), "Origin": origin}).status_code == 403, (path, origin)
        stranger = ask(guarded, path, method)
        if "/static/" in path or path == "/dashboard/login":
            assert stranger.status_code in (200, 303), path
        elif method == "GET":
            assert (stranger.status_code, stranger.headers["location"]) == (303, "/dashboard/login"), path
        else:
            assert stranger.status_code == 401, path


def test_a_client_of_the_api_sees_no_dashboard_and_its_owner_no_models(own_home: Path) -> None:
    owners, watch = dashboard_token(), Watch(lambda label, reason: None, open_database)
    path = "/releases/x/1/promote"
    with closing(open_database()) as database:
        client = make_client(database, "app")
    gateway = Gateway(Keeper(Wanted, lambda wanted: None), watch)  # type: ignore[arg-type, return-value]
    both = guarded_gateway(gateway, GatewaySettings(), 8642, dashboard_addition), f"{HERE}:8642"
    for cookie in ("", cookie_of_home(), cookie_name()):
        headers = {"Cookie": f"{cookie}={client}"} if cookie else {"Authorization": f"Bearer {client}"}
        refused = ask(both, "/dashboard/", headers=headers)
        assert (refused.status_code, refused.headers["location"]) == (303, "/dashboard/login")
        posted = ask(both, f"/dashboard{path}", "POST", headers=headers, data={"token": form_token(path)})
        assert posted.status_code == 401
    for headers in ({"Authorization": f"Bearer {owners}"}, {"Cookie": f"{cookie_name()}={cookie_value()}"}):
        assert ask(both, "/v1/models", headers=headers).status_code == 401
        assert ask(both, "/dashboard/", headers=headers).status_code == 200
    for host, shown in (("127.0.0.1", 1), ("localhost", 1), ("::1", 1), ("0.0.0.0", 0), ("192.168.1.7", 0)):
        assert is_loopback(host) == bool(shown), "a gateway that others can reach has no dashboard"


def test_every_answer_forbids_foreign_and_inline_content(guarded: Guarded) -> None:
    everything()
    for path, method in routes_of(guarded[0].app):
        answer = ask(guarded, path, method, headers=owner())
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy, path
        assert "unsafe" not in policy, path
        assert answer.headers["x-content-type-options"] == "nosniff"
        if "html" in answer.headers.get("content-type", ""):
            assert inline_in(answer.text) == [], path


def inline_in(page: str) -> list[str]:
    """Return tags of a page with code or style of their own, or that only a hostile text can have brought."""
    found = []

    class Parser(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            names = {name for name, _ in attrs}
            if tag in ("style", "img", "iframe", "base", "b") or (tag == "script" and "src" not in names):
                found.append(tag)
            found.extend(name for name in names if name.startswith("on") or name == "style")

    Parser().feed(page)
    return found


def test_pages_show_everything_and_escape_it_and_say_what_is_not_there(guarded: Guarded) -> None:
    going, finished = run_id(everything()), run_id(home() / "runs" / "finished")
    for path, text in {
        "/": "12 of 200 new groups(.|\n)*refused: the gate refused it",
        "/runs": "runs/finished",
        f"/runs/{going}": "30 of 200",
        f"/runs/{finished}": "40 of 40",
        f"/runs/{finished}/evaluation": "Verdict: <strong>deploy",
        "/releases": "helpdesk@2",
        "/releases/helpdesk/1": "no champion before it",
        "/releases/helpdesk/2": "Promote",
        "/data": "1 interaction",
        f"/data/{SNAPSHOT}/report": "of 10 rows",
        "/review": "1 row",
    }.items():
        page = shown(guarded, path)
        assert re.search(text, page), (path, page)
        assert inline_in(page) == [], path
    nowhere = ("/runs/abc", "/releases/helpdesk/9", "/data/abc/report", "/nothing", "/releases/x/x")
    for path in nowhere:
        assert '<p class="problem">' in shown(guarded, path, 404)


def test_files_of_another_version_or_damaged_ones_are_said(guarded: Guarded) -> None:
    everything()
    finished = f"/runs/{run_id(home() / 'runs' / 'finished')}"
    lacking = evaluation()
    del lacking["answers"][0]["base"]["seconds"]
    for damaged in ({"schema": 0, "tuned": {}}, lacking):
        write_json(home() / "runs/finished/eval.json", damaged)
        assert "another version" in shown(guarded, f"{finished}/evaluation", 400)
    (home() / "snapshots/one/report.json").write_text('{"usable": 3}')
    assert "another version" in shown(guarded, f"/data/{SNAPSHOT}/report", 400)
    (home() / "releases/helpdesk/1/adapter_model.safetensors").chmod(0o600)
    (home() / "releases/helpdesk/1/adapter_model.safetensors").write_bytes(b"other")
    assert "damaged" in shown(guarded, "/releases/helpdesk/1")
    with closing(open_database()) as database:
        database.execute("UPDATE releases SET pruned = 1 WHERE version = 2")
    assert "Its files were pruned." in shown(guarded, "/releases/helpdesk/2")
    (home() / "hive.db").write_bytes(b"not a database" * 100)
    for path in ("/", "/runs", "/data", "/releases"):
        answer = ask(guarded, f"/dashboard{path}", headers=owner())
        assert answer.status_code in (400, 500) and "damaged" in answer.text, path


def test_the_token_is_traded_for_a_cookie_that_no_script_reads(guarded: Guarded) -> None:
    token = dashboard_token()
    for answer in (
        ask(guarded, f"/dashboard/login?token={token}"),
        ask(guarded, "/dashboard/login", "POST", data={"token": f" {token}\n"}),
    ):
        assert (answer.status_code, answer.headers["location"]) == (303, "/dashboard/")
        cookie = answer.headers["set-cookie"]
        assert "HttpOnly" in cookie and "SameSite=strict" in cookie and token not in cookie
    value = cookie.partition("=")[2].partition(";")[0]
    for cookies in (f"{cookie_name()}={value}", f'look={{"dark": true}}; {cookie_name()}={value}; of another=port'):
        assert ask(guarded, "/dashboard/runs", headers={"Cookie": cookies}).status_code == 200
    for wrong in ("", "x", token[:-1], value[:-1] + "0" * (value[-1] != "0") + "1" * (value[-1] == "0"), "\u00e9"):
        refused = ask(guarded, "/dashboard/login", "POST", data={"token": wrong})
        assert refused.status_code == (401 if wrong else 200) and "set-cookie" not in refused.headers
        cookie = f"{cookie_name()}={urllib.parse.quote(wrong)}"
        assert ask(guarded, "/dashboard/runs", headers={"Cookie": cookie}).status_code == 303
    signed_in = {"Cookie": f"{cookie_name()}={value}"}
    left = ask(guarded, "/dashboard/logout", "POST", headers=signed_in, data={"token": form_token("/logout")})
    assert left.headers["location"] == "/dashboard/login" and "Max-Age=0" in left.headers["set-cookie"]
    dashboard_token(new=True)  # everybody is signed out
    assert ask(guarded, "/dashboard/runs", headers=signed_in).status_code == 303


@pytest.mark.parametrize("path", ["/login", "/logout", "/data/forget"])
def test_a_form_that_cannot_be_read_is_refused_in_words(guarded: Guarded, path: str) -> None:
    many = b"&".join(b"a%d=1" % n for n in range(60))
    for body in (b"token=\xff", b"token=%ff", b"x" * (MAX_FORM_BYTES + 1), many):
        assert "form" in shown(guarded, path, 400, "POST", content=body), body[:10]


def test_a_forms_token_is_of_its_own_page(guarded: Guarded) -> None:
    """Without the form's token, or with a wrong one or another form's, an action does nothing."""
    everything()
    for path in (*(example(path).replace("/x/1/", "/helpdesk/2/") for path in FORMS), "/logout"):
        for token in ("", "x", form_token("/releases/helpdesk/1/promote"), dashboard_token()):
            form = {"token": token, "kind": "user", "value": HOSTILE}
            shown(guarded, path, 403, "POST", data=form)
            shown(guarded, f"{path}?{urllib.parse.urlencode(form)}", 403, "POST")
    with closing(open_database()) as database:
        assert find(database, "helpdesk").label == "helpdesk@1"
        assert database.execute("SELECT count(*) FROM interactions").fetchone() == (1,)


def test_actions_do_what_their_commands_do(guarded: Guarded) -> None:
    everything()
    first, second = "/releases/helpdesk/1", "/releases/helpdesk/2"
    post(guarded, f"{second}/promote", reason=HOSTILE)
    with closing(open_database()) as database:
        assert find(database, "helpdesk").label == "helpdesk@2"
        assert database.execute("SELECT reason FROM moves ORDER BY number DESC").fetchall()[0] != ("",)
    post(guarded, f"{first}/rollback", 400)  # it is not the champion any more
    assert "Roll back to helpdesk@1" in shown(guarded, second)
    post(guarded, f"{second}/rollback", reason="worse")
    page = shown(guarded, first)
    assert "/rollback" not in page and "no champion before it" in page
    assert "no champion before helpdesk@1" in shown(guarded, f"{first}/rollback", 400)
    assert "rolled back" in post(guarded, f"{second}/promote", 409)  # not without the command's --force
    assert "kept out from now on: 1 interaction." in post(guarded, "/data/forget", kind="user", value=HOSTILE)
    for wrong in ({"kind": "user", "value": ""}, {"kind": "all", "value": "x"}, {}, {"kind": "row", "value": "no:1"}):
        post(guarded, "/data/forget", 400, **wrong)
    going = home() / "runs" / "going"
    stop = f"/runs/{run_id(going)}/stop"
    assert "It had ended already." in post(guarded, stop)
    with supervisor(going) as training:
        assert "Stop" in shown(guarded, stop)
        assert "ends after the step" in post(guarded, stop)
        assert training.wait(30) == -signal.SIGTERM
    with supervisor(going) as training, Journal(going / EVENTS) as events:
        events.append("stop_requested", signal=15)
        assert "asked to stop already" in post(guarded, stop)  # a second signal would cost the checkpoint
        assert training.poll() is None
