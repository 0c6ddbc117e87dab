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
from hivetune.dashboard.app import MAX_FORM_BYTES, guarded_dashboard
from hivetune.dashboard.page import cookie_name, dashboard_token, form_token
from hivetune.dashboard.pages import PAGES
from hivetune.dashboard.watched import run_id
from hivetune.release.registry import find
from hivetune.run.folder import EVENTS
from hivetune.serve.guard import Guard
from hivetune.serve.run import listen_on

HERE = "http://127.0.0.1"


@pytest.fixture
def guarded(own_home: Path) -> Iterator[tuple[Guard, str]]:
    """Return the application as it is served, and its origin."""
    dashboard_token()
    with closing(listen_on("127.0.0.1", 0)) as listening:
        app = guarded_dashboard(listening)
        assert isinstance(app, Guard)
        yield app, f"{HERE}:{listening.getsockname()[1]}"


def ask(guarded: tuple[Guard, str], path: str, method: str = "GET", **more: Any) -> httpx2.Response:
    app, origin = guarded

    async def sent() -> httpx2.Response:
        transport = httpx2.ASGITransport(app=app)
        async with httpx2.AsyncClient(transport=transport, base_url=origin) as client:
            return await client.request(method, path, **more)

    return asyncio.run(sent())


def owner() -> dict[str, str]:
    return {"Authorization": f"Bearer {dashboard_token()}"}


def routes_of(app: Any, below: str = "") -> Iterator[tuple[str, frozenset[str]]]:
    """Yield every (path, methods) that an application answers, mounted ones included."""
    for route in app.routes:
        if isinstance(route, Mount):
            yield from routes_of(route.app, below + route.path)
        else:
            assert isinstance(route, Route), f"a route of a kind that this test does not know: {route}"
            yield below + route.path, frozenset(route.methods or ())


def example(path: str) -> str:
    return re.sub(r"\{(\w+)(:\w+)?\}", lambda found: "1" if found[2] == ":int" else "x", path)


def test_every_route_is_behind_the_guard(guarded: tuple[Guard, str]) -> None:
    """There is no list to forget a path in: every route is asked, with every method."""
    found = list(routes_of(guarded[0].app))
    assert len(found) > len(PAGES) + len(FORMS)
    port = guarded[1].rpartition(":")[2]
    open_paths = {"/", "/dashboard/login"}
    for path, methods in found:
        for method in methods - {"HEAD"}:
            address = example(path)
            for host in ("evil.example", f"evil.example:{port}", "127.0.0.1", f"127.0.0.1:{int(port) ^ 1}", ""):
                assert ask(guarded, address, method, headers={**owner(), "Host": host}).status_code == 421, (path, host)
            for origin in ("http://evil.example", "null", "http://127.0.0.1:1", f"http://evil.example:{port}"):
                refused = ask(guarded, address, method, headers={**owner(), "Origin": origin})
                assert refused.status_code == 403, (path, origin)
            stranger = ask(guarded, address, method)
            if "/static/" in path or address in open_paths:
                assert stranger.status_code in (200, 303), path
            elif method == "GET":
                assert (stranger.status_code, stranger.headers["location"]) == (303, "/dashboard/login"), path
            else:
                assert stranger.status_code == 401, path


def test_every_answer_forbids_foreign_and_inline_content(guarded: tuple[Guard, str]) -> None:
    everything()
    for path, methods in routes_of(guarded[0].app):
        for method in methods - {"HEAD"}:
            answer = ask(guarded, example(path), method, headers=owner())
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


def test_pages_show_everything_and_escape_it(guarded: tuple[Guard, str]) -> None:
    going = everything()
    finished = run_id(home() / "runs" / "finished")
    paths = {
        "": "Nothing is due|going",
        "runs": "runs/finished",
        f"runs/{run_id(going)}": "30 of 200",
        f"runs/{finished}": "learning_rate",
        f"runs/{finished}/evaluation": "Verdict: <strong>deploy",
        "cycles/faq": "12 of 200 new groups(.|\n)*the gate refused it",
        "releases": "helpdesk@2",
        "releases/helpdesk/1": "no champion before it",
        "releases/helpdesk/2": "Promote",
        "releases/helpdesk/1/rows": "108 rows",
        "releases/helpdesk/1/rows?split=train&page=3": "page 3 of 3",
        "data": "1 interaction",
        f"data/{SNAPSHOT}/report": "of 10 rows",
        "review": "1 row",
    }
    for path, text in paths.items():
        answer = ask(guarded, f"/dashboard/{path}", headers=owner())
        assert answer.status_code == 200, (path, answer.text)
        assert re.search(text, answer.text), (path, answer.text)
        assert inline_in(answer.text) == [], path


def test_what_is_not_there_is_said(guarded: tuple[Guard, str]) -> None:
    everything()
    for path in (
        "runs/abc",
        "cycles/other",
        "releases/helpdesk/9",
        "data/abc/report",
        "nothing",
        "releases/helpdesk/x",
    ):
        answer = ask(guarded, f"/dashboard/{path}", headers=owner())
        assert answer.status_code == 404, path
        assert '<p class="problem">' in answer.text
    answer = ask(guarded, "/dashboard/releases/helpdesk/1/rows?split=all&page=-4", headers=owner())
    assert answer.status_code == 400 and "unknown split" in answer.text
    for number in ("-4", "0", "9" * 5000, "\u00b2", "999999999"):
        address = f"/dashboard/releases/helpdesk/1/rows?page={urllib.parse.quote(number)}"
        assert ask(guarded, address, headers=owner()).status_code == 200, number[:9]


def test_files_of_another_version_or_damaged_ones_are_said(guarded: tuple[Guard, str]) -> None:
    everything()
    finished = run_id(home() / "runs" / "finished")
    write_json(home() / "runs/finished/eval.json", {"schema": 0, "tuned": {}})
    (home() / "snapshots/one/report.json").write_text('{"usable": 3}')
    for path in (f"runs/{finished}/evaluation", f"data/{SNAPSHOT}/report"):
        answer = ask(guarded, f"/dashboard/{path}", headers=owner())
        assert answer.status_code == 400 and "another version" in answer.text, path
    answers = evaluation()["answers"]
    del answers[0]["base"]["seconds"]
    write_json(home() / "runs/finished/eval.json", {**evaluation(), "answers": answers})
    answer = ask(guarded, f"/dashboard/runs/{finished}/evaluation", headers=owner())
    assert answer.status_code == 400 and "another version" in answer.text
    (home() / "releases/helpdesk/2/manifest.json").chmod(0o600)
    (home() / "releases/helpdesk/2/manifest.json").write_text('{"judgement": {"verdict": "deploy"}}')
    answer = ask(guarded, "/dashboard/releases", headers=owner())
    assert answer.status_code == 200 and "helpdesk@1" in answer.text
    (home() / "runs/finished/config.resolved.yaml").write_text("config: [")
    shown = ask(guarded, f"/dashboard/runs/{finished}", headers=owner())
    assert shown.status_code == 200 and "config.resolved.yaml" in shown.text
    (home() / "releases/helpdesk/1/adapter_model.safetensors").chmod(0o600)
    (home() / "releases/helpdesk/1/adapter_model.safetensors").write_bytes(b"other")
    shown = ask(guarded, "/dashboard/releases/helpdesk/1", headers=owner())
    assert shown.status_code == 200 and "damaged" in shown.text
    with closing(open_database()) as database:
        database.execute("UPDATE releases SET pruned = 1 WHERE version = 2")
    assert "Its files were pruned." in ask(guarded, "/dashboard/releases/helpdesk/2", headers=owner()).text
    (home() / "hive.db").write_bytes(b"not a database" * 100)
    for path in ("", "runs", "data", "releases"):
        answer = ask(guarded, f"/dashboard/{path}", headers=owner())
        assert answer.status_code in (400, 500) and "damaged" in answer.text, path


def test_the_token_is_traded_for_a_cookie_that_no_script_reads(guarded: tuple[Guard, str]) -> None:
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
    dashboard_token(new=True)  # everybody is signed out
    assert ask(guarded, "/dashboard/runs", headers={"Cookie": f"{cookie_name()}={value}"}).status_code == 303


def test_a_form_that_cannot_be_read_is_refused_in_words(guarded: tuple[Guard, str]) -> None:
    for path in ("login", "logout", "data/forget"):
        for body in (
            b"token=\xff",
            b"token=%ff",
            b"x" * (MAX_FORM_BYTES + 1),
            b"&".join(b"a%d=1" % n for n in range(60)),
        ):
            refused = ask(guarded, f"/dashboard/{path}", "POST", headers=owner(), content=body)
            assert refused.status_code == 400 and "form" in refused.text, (path, body[:10])


def test_a_forms_token_is_of_its_own_page(guarded: tuple[Guard, str]) -> None:
    """Without the form's token, or with a wrong one or another form's, an action does nothing."""
    everything()
    for path in (*(example(path) for path in FORMS), "/logout"):
        address = path.replace("/x/1/", "/helpdesk/2/")
        for token in ("", "x", form_token("/releases/helpdesk/1/promote"), dashboard_token()):
            form = {"token": token, "kind": "user", "value": HOSTILE}
            answer = ask(guarded, f"/dashboard{address}", "POST", headers=owner(), data=form)
            assert answer.status_code == 403, (path, token)
            asked = ask(guarded, f"/dashboard{address}?{urllib.parse.urlencode(form)}", "POST", headers=owner())
            assert asked.status_code == 403
    with closing(open_database()) as database:
        assert find(database, "helpdesk").label == "helpdesk@1"
        assert database.execute("SELECT count(*) FROM interactions").fetchone() == (1,)


def test_actions_do_what_their_commands_do(guarded: tuple[Guard, str]) -> None:
    everything()

    def post(path: str, **fields: str) -> httpx2.Response:
        form = {"token": form_token(path), **fields}
        return ask(guarded, f"/dashboard{path}", "POST", headers={**owner(), "Origin": guarded[1]}, data=form)

    assert post("/releases/helpdesk/2/promote", reason=HOSTILE).status_code == 200
    with closing(open_database()) as database:
        assert find(database, "helpdesk").label == "helpdesk@2"
        assert database.execute("SELECT reason FROM moves ORDER BY number DESC").fetchall()[0] != ("",)
    assert post("/releases/helpdesk/1/rollback").status_code == 400  # it is not the champion any more
    shown = ask(guarded, "/dashboard/releases/helpdesk/2", headers=owner()).text
    assert "Roll back to helpdesk@1" in shown
    assert post("/releases/helpdesk/2/rollback", reason="worse").status_code == 200
    shown = ask(guarded, "/dashboard/releases/helpdesk/1", headers=owner()).text
    assert "/rollback" not in shown and "no champion before it" in shown
    confirm = ask(guarded, "/dashboard/releases/helpdesk/1/rollback", headers=owner())
    assert confirm.status_code == 400 and "no champion before helpdesk@1" in confirm.text
    refused = post("/releases/helpdesk/2/promote")
    assert refused.status_code == 409 and "rolled back" in refused.text  # not without the command's --force
    gone = post("/data/forget", kind="user", value=HOSTILE)
    assert gone.status_code == 200 and "1 interactions were removed" in gone.text
    for wrong in ({"kind": "user", "value": ""}, {"kind": "all", "value": "x"}, {}):
        assert post("/data/forget", **wrong).status_code == 400  # type: ignore[arg-type]
    assert post("/data/forget", kind="row", value="nowhere:1").status_code == 400
    going = home() / "runs" / "going"
    stop = f"/runs/{run_id(going)}/stop"
    assert "It had ended already." in post(stop).text
    with supervisor(going) as training:
        assert "Stop" in ask(guarded, f"/dashboard{stop}", headers=owner()).text
        assert "ends after the step" in post(stop).text
        assert training.wait(30) == -signal.SIGTERM
    with supervisor(going) as training, Journal(going / EVENTS) as events:
        events.append("stop_requested", signal=15)
        assert "asked to stop already" in post(stop).text  # a second signal would cost the checkpoint
        assert training.poll() is None
