"""The gateway as its clients see it: the OpenAI API, labels, swaps without a lost request, capture, refusals."""

import json
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from serve.hive import Running, add_release, gateway, stored, wait_until
from serve.storm import storm, truth_of

pytestmark = pytest.mark.slow


LABELS = ("helpdesk@1", "helpdesk@2")


def test_the_official_client_and_curl_get_labelled_answers(served: Running) -> None:
    from openai import APIStatusError, NotFoundError, OpenAI  # 1 s, and every worker of pytest-xdist reads this file

    first, second = LABELS
    client = OpenAI(base_url=f"{served.url}/v1", api_key=served.token, max_retries=0)
    assert [model.id for model in client.models.list()] == ["helpdesk", first, second, "base"]
    messages: Any = [{"role": "user", "content": "hello"}]
    texts = {}
    for model, label in (("helpdesk", first), (first, first), (second, second), ("base", "base")):
        answer = client.chat.completions.create(model=model, messages=messages, max_tokens=6, temperature=0)
        assert answer.system_fingerprint == answer.model == label
        texts[model] = answer.choices[0].message.content
    assert texts["helpdesk"] == texts[first]
    assert len({texts[first], texts[second], texts["base"]}) == 3
    with pytest.raises(NotFoundError, match="served are: helpdesk"):
        client.chat.completions.create(model="nobody", messages=messages)
    with pytest.raises(APIStatusError) as long:
        client.chat.completions.create(model="base", messages=[{"role": "user", "content": "word " * 2000}])
    assert long.value.status_code == 400 and "context" in str(long.value)
    curl = ["curl", "-s", f"{served.url}/v1/chat/completions", "-H", f"Authorization: Bearer {served.token}"]
    body = json.dumps({"model": "helpdesk", "messages": messages, "max_tokens": 2})
    done = subprocess.run([*curl, "-d", body], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["model"] == first
    said = set()
    for number in range(4):  # with another conversation between, which takes the slot's cache
        again = client.chat.completions.create(model="base", messages=messages, max_tokens=32, temperature=0, seed=1)
        said.add(again.choices[0].message.content)
        served.chat(f"hello again, number {number}", "base")
    assert len(said) == 1
    assert "hello" not in served.log.read_text()  # no prompt in a log


def weather(tmp_path: Path, *, requests: int, clients: int, swaps: int, kills: int) -> Counter[str]:
    """Run a storm on a gateway that captures: nothing is lost, nothing mislabelled, each answer is stored once. Returns
    the number of answers by kind and by release."""
    for seed in (1, 2):
        add_release(tmp_path, "helpdesk", seed, champion=seed == 1)
    with gateway(tmp_path / "log", "--capture") as running:
        outcomes = storm(running, tmp_path, requests=requests, clients=clients, swaps=swaps, kills=kills)
        assert [outcome for _, outcome in outcomes if outcome.kind == "lost"] == []
        assert len(outcomes) == requests
        whole = [(asked, outcome) for asked, outcome in outcomes if outcome.kind == "whole"]
        wait_until(lambda: running.metric("hivetune_captured_answers") == len(whole))
        ids = {row[0] for row in stored()}
        wait_until(lambda: running.metric("hivetune_swaps") >= swaps // 5)  # the last may still be starting
        truth = truth_of(running, {(outcome.label, asked) for asked, outcome in whole})
        assert [each for each in whole if truth[each[1].label, each[0]] != each[1].text] == []
        assert running.metric('hivetune_answers_total{outcome="broken_stream"') == len(outcomes) - len(whole)
        assert running.metric("hivetune_backend_restarts") >= kills
    assert ids == {outcome.id for _, outcome in whole} and len(ids) == len(whole)
    return Counter([outcome.kind for _, outcome in outcomes] + [outcome.label for _, outcome in whole])


def test_a_storm_loses_nothing_and_mislabels_nothing(own_home: Path, tmp_path: Path) -> None:
    assert weather(tmp_path, requests=300, clients=8, swaps=5, kills=1)["whole"] > 290


@pytest.mark.proof
def test_ten_thousand_requests(own_home: Path, tmp_path: Path, record_property: Any) -> None:
    found = weather(tmp_path, requests=10_000, clients=16, swaps=20, kills=3)
    assert found["lost"] == 0 and found["whole"] > 9_900
    for name, count in found.items():
        record_property(name, count)


def test_a_restarted_gateway_finds_what_it_should_serve(own_home: Path, tmp_path: Path) -> None:
    label = add_release(tmp_path, "helpdesk", 1, champion=True)
    with gateway(tmp_path / "log") as running:
        token, backends = running.token, running.backends()
        running.process.kill()
        running.process.wait()
        wait_until(lambda: not any(alive(pid) for pid in backends))
    with gateway(tmp_path / "log", token=token) as again:
        assert again.chat("hello")["model"] == label


def alive(pid: int) -> bool:
    import psutil

    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
