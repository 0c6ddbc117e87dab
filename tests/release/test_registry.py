"""Releases: aliases and their history move together, artefacts never change, and no crash leaves a third state."""

import hashlib
import os
import shutil
import signal
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from crashes import each_crash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hivetune.base.database import open_database
from hivetune.base.disk import MANIFEST, home, read_json, write_json, write_manifest
from hivetune.cli.release import promote as promote_by_command
from hivetune.errors import Busy, HivetuneError, NotDeployed, UsageError
from hivetune.release import registry
from hivetune.release.registry import Release, find, history, promote, register, releases, rollback


@pytest.fixture
def database(own_home: Path) -> Iterator[sqlite3.Connection]:
    with closing(open_database()) as opened:
        yield opened


def finished_run(folder: Path, number: int = 0, *, export: bool = False) -> Path:
    """What training, evaluation and export leave of a run, as far as the registry reads it."""
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(b"weights %d" % number)
    (folder / "config.resolved.yaml").write_text("config: {}\n")
    write_json(folder / "run.json", {"name": "demo"})
    if export:
        exported = folder / "export" / "gguf-f16"
        exported.mkdir(parents=True)
        (exported / "demo-f16.gguf").write_bytes(b"GGUF" * 100)
        write_manifest(exported, {"adapter_sha256": about(folder)["adapter_sha256"]})
    return folder


def about(run: Path, verdict: str | None = "deploy", snapshot: str = "s") -> dict[str, Any]:
    sha256 = hashlib.sha256((run / "adapter_model.safetensors").read_bytes()).hexdigest()
    more = {"model": "m", "model_sha256": "0" * 64, "snapshot": snapshot, "proof": {}}
    return {**more, "adapter_sha256": sha256, "verdict": verdict}


def add(database: sqlite3.Connection, tmp_path: Path, number: int, verdict: str | None = "deploy") -> Release:
    run = finished_run(tmp_path / f"run{number}", number)
    return register(database, run, "helpdesk", about(run, verdict), by="test")[0]


def aliases(database: sqlite3.Connection) -> dict[str, int]:
    return {alias: release.version for release in releases(database, "helpdesk") for alias in release.aliases}


def champions(database: sqlite3.Connection, *numbers: int, folder: Path) -> None:
    for number in numbers:
        promote(database, add(database, folder, number).label, by="ann")


def test_a_release_keeps_its_files_when_the_run_is_gone(database: sqlite3.Connection, tmp_path: Path) -> None:
    run = finished_run(tmp_path / "run", export=True)
    release, new = register(database, run, "helpdesk", about(run), by="test")
    shutil.rmtree(run)
    assert new and release.label == "helpdesk@1" and release.aliases == ("candidate",)
    release.check()
    assert (release.folder / "exports/gguf-f16/demo-f16.gguf").read_bytes() == b"GGUF" * 100
    assert all(path.stat().st_mode & 0o777 == 0o400 for path in release.folder.rglob("*") if path.is_file())


def test_two_that_register_at_the_same_time_never_copy_into_one_folder(
    database: sqlite3.Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy of the first is on its way when the second comes."""
    first, second = finished_run(tmp_path / "a", 1), finished_run(tmp_path / "b", 2)
    copy, said = registry._copy, []

    def slow(*arguments: Any, **options: Any) -> None:
        with pytest.raises(Busy) as raised:
            register(database, second, "helpdesk", about(second), by="test")
        said.append(raised.value.hint)
        copy(*arguments, **options)

    monkeypatch.setattr(registry, "_copy", slow)
    release, _ = register(database, first, "helpdesk", about(first), by="test")
    assert release.label == "helpdesk@1" and "registers a release" in said[0]
    release.check()


def test_the_same_adapter_is_registered_once_and_takes_a_later_verdict_and_export(
    database: sqlite3.Connection, tmp_path: Path
) -> None:
    """A release without a GGUF adapter can't be served; registered again it can."""
    run = finished_run(tmp_path / "run")
    release, _ = register(database, run, "helpdesk", about(run, None), by="test")
    promote(database, release.label, by="ann", force=True, reason="a test")
    shutil.rmtree(run)
    finished_run(run, export=True)
    for round_ in range(2):
        inode = release.folder.stat().st_ino
        again, new = register(database, run, "helpdesk", about(run) | {"proof": {"holds": True}}, by="test")
        assert (again.label, new, again.aliases, again.verdict) == ("helpdesk@1", False, ("champion",), "deploy")
        again.check()
        assert read_json(release.folder / MANIFEST)["verdict"] == "deploy"  # what `releases` tells
        assert (again.folder / "exports/gguf-f16/demo-f16.gguf").is_file() and again.proof == {"holds": True}
        assert (release.folder.stat().st_ino == inode) == (round_ == 1)  # nothing more to add
    assert [path.name for path in release.folder.parent.iterdir()] == ["1"]


def test_a_verdict_by_other_thresholds_is_taken_though_it_is_the_same(
    database: sqlite3.Connection, tmp_path: Path
) -> None:
    """Lineage showed the thresholds of the first registration."""
    run = finished_run(tmp_path / "run")
    for limit in (0.0, 0.5):
        facts = about(run) | {"judgement": {"gate": {"loss_gain": limit}, "judged_by": "ann"}}
        release, _ = register(database, run, "helpdesk", facts, by="test")
    assert read_json(release.folder / MANIFEST)["judgement"]["gate"] == {"loss_gain": 0.5}


def test_names_mean_the_champion_and_aliases_move_together(database: sqlite3.Connection, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no release is called 'helpdesk'"):
        find(database, "helpdesk")
    first, second = add(database, tmp_path, 1), add(database, tmp_path, 2)
    with pytest.raises(UsageError, match="has no champion yet") as error:
        find(database, "helpdesk")
    assert "helpdesk@1, helpdesk@2 (candidate)" in error.value.hint
    promote(database, first.label, by="ann", reason="first")
    promote(database, "helpdesk@candidate", by="ann", reason="better")
    assert aliases(database) == {"champion": 2, "previous": 1}
    assert find(database, "helpdesk").label == second.label
    assert registry.champion_versions(database) == {"helpdesk": 2}
    moves = [(move.action, move.version, move.by) for move in history(database, "helpdesk")]
    assert moves[2:] == [("promoted", 1, "ann"), ("promoted", 2, "ann")]
    for wrong, words in (
        ("helpdesc", "see them: hivetune releases"),
        ("helpdesk@9", "helpdesk@1 (previous)"),
        ("helpdesk@x", "use a"),
    ):
        with pytest.raises(UsageError) as error:
            find(database, wrong)
        assert words in error.value.hint


@pytest.mark.parametrize("verdict", [None, "iterate", "abort", "not-enough-evidence"])
def test_what_the_gate_refused_is_promoted_only_with_a_reason(
    verdict: str | None, database: sqlite3.Connection, tmp_path: Path
) -> None:
    release = add(database, tmp_path, 1, verdict)
    with pytest.raises(NotDeployed):
        promote(database, release.label, by="ann")
    with pytest.raises(UsageError, match="needs --reason"):
        promote(database, release.label, by="ann", force=True)
    promote(database, release.label, by="ann", force=True, reason="a customer asked")
    (move,) = [move for move in history(database, "helpdesk") if move.action == "promoted"]
    assert move.forced and move.reason == "a customer asked"


def test_a_rollback_returns_and_never_comes_back_by_itself(database: sqlite3.Connection, tmp_path: Path) -> None:
    """Two who object to one release roll one back; the log keeps the reason, and its successor's line another."""
    champions(database, 1, 2, 3, folder=tmp_path)
    withdrawn = rollback(database, "helpdesk@3", by="gateway", reason="complaints")
    assert (withdrawn.version, withdrawn.withdrawn, withdrawn.aliases) == (3, "complaints", ())
    with pytest.raises(UsageError, match="helpdesk@3 is no longer the champion"):
        rollback(database, "helpdesk@3", by="cycle", reason="it is slow")
    assert aliases(database) == {"champion": 2, "previous": 1}
    with pytest.raises(NotDeployed, match="rolled back: complaints"):
        promote(database, "helpdesk@3", by="cycle")
    rollback(database, "helpdesk", by="ann", reason="again")
    assert aliases(database) == {"champion": 1}
    with pytest.raises(UsageError, match="no previous release"):
        rollback(database, "helpdesk", by="ann", reason="and again")
    promote(database, "helpdesk@3", by="ann", reason="once more", force=True)
    told = [[(move.action, move.by, move.reason) for move in each.moves] for each in releases(database)]
    assert told[1][2:] == [("returned", "gateway", "helpdesk@3 withdrawn: complaints"), ("withdrawn", "ann", "again")]
    assert told[2] == [
        ("registered", "test", ""),
        ("promoted", "ann", ""),
        ("withdrawn", "gateway", "complaints"),
        ("promoted", "ann", "once more"),
    ]


def test_a_candidate_is_withdrawn_alone(database: sqlite3.Connection, tmp_path: Path) -> None:
    """As the gateway does with one that fails in its part of the traffic."""
    champions(database, 1, folder=tmp_path)
    assert rollback(database, add(database, tmp_path, 2).label, by="gateway", reason="").withdrawn == "rolled back"
    assert aliases(database) == {"champion": 1}
    with pytest.raises(UsageError, match="no longer the champion or the candidate"):
        rollback(database, "helpdesk@2", by="gateway", reason="late")
    with pytest.raises(NotDeployed, match="rolled back"):
        promote(database, "helpdesk@2", by="cycle")


def test_a_retired_champion_that_is_promoted_again_returns_to_the_one_before(
    database: sqlite3.Connection, tmp_path: Path
) -> None:
    promote(database, add(database, tmp_path, 1).label, by="ann")
    registry.retire(database, "helpdesk", by="experts", reason="nobody asks it")
    promote(database, "helpdesk@1", by="ann")
    assert aliases(database) == {"champion": 1} and registry.rollback_target(database, "helpdesk") is None
    with pytest.raises(UsageError, match="no previous release"):
        rollback(database, "helpdesk", by="ann", reason="worse")
    promote(database, add(database, tmp_path, 2).label, by="ann")
    registry.retire(database, "helpdesk", by="experts", reason="nobody asks it")
    promote(database, "helpdesk@2", by="ann")
    assert aliases(database) == {"champion": 2, "previous": 1}


def test_a_name_alone_promotes_no_candidate_and_says_so(
    database: sqlite3.Connection, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    promote(database, add(database, tmp_path, 1).label, by="ann")
    add(database, tmp_path, 2)
    promote_by_command("helpdesk")
    told = capsys.readouterr()
    assert "helpdesk@1 is the champion" in told.out and "hivetune promote helpdesk@2" in told.err
    promote_by_command("helpdesk@2")
    assert "nothing changed" not in capsys.readouterr().err
    assert aliases(database) == {"champion": 2, "previous": 1}


def change_a_byte(folder: Path) -> None:
    (folder / "adapter_model.safetensors").write_bytes(b"weightz 2")


def mend_the_manifest(folder: Path) -> None:
    change_a_byte(folder)
    write_manifest(folder, {**read_json(folder / MANIFEST), "adapter_sha256": "1" * 64})


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (change_a_byte, r"adapter_model.safetensors"),
        (mend_the_manifest, "its adapter is not the registered one"),
        (shutil.rmtree, "manifest.json"),
    ],
)
def test_a_damaged_release_is_not_promoted_and_whole_when_its_run_is_registered_again(
    damage: Callable[[Path], object], words: str, database: sqlite3.Connection, tmp_path: Path
) -> None:
    """No hint rolls back a champion that is whole."""
    champion, candidate = promote(database, add(database, tmp_path, 1).label, by="ann"), add(database, tmp_path, 2)
    for release in (champion, candidate):
        for path in release.folder.rglob("*"):
            path.chmod(0o700)
        damage(release.folder)
    with pytest.raises(HivetuneError, match=f"helpdesk@2 is damaged: .*{words}") as of_candidate:
        promote(database, candidate.label, by="ann")
    assert of_candidate.value.hint == f"register its run again: hivetune register {tmp_path}/run2 --as helpdesk"
    with pytest.raises(HivetuneError, match=words) as of_champion:
        find(database, "helpdesk").check()
    assert of_champion.value.hint.endswith("hivetune rollback helpdesk")
    assert aliases(database) == {"candidate": 2, "champion": 1}
    register(database, tmp_path / "run2", "helpdesk", about(tmp_path / "run2"), by="ann")
    assert promote(database, candidate.label, by="ann").label == candidate.label


def test_only_what_nothing_names_is_pruned(database: sqlite3.Connection, tmp_path: Path) -> None:
    champions(database, 1, 2, 3, 4, folder=tmp_path)
    unused = [release for release in releases(database) if not release.aliases]
    assert [release.version for release in unused] == [1, 2]
    with pytest.raises(UsageError, match="in use"):
        registry.prune(database, find(database, "helpdesk@previous"))
    registry.prune(database, unused[0])
    assert not unused[0].folder.exists()
    with pytest.raises(UsageError, match="were deleted by"):
        find(database, "helpdesk@1").check()
    with pytest.raises(UsageError, match="were deleted by"):
        promote(database, "helpdesk@1", by="ann")


@pytest.mark.parametrize("name", ["", "Helpdesk", "a b", "-a", "a-", "a@b", "../a", "a" * 65, "base"])
def test_names_are_plain(name: str, database: sqlite3.Connection, tmp_path: Path) -> None:
    run = finished_run(tmp_path / "run")
    with pytest.raises(UsageError, match="can't be the name"):
        register(database, run, name, about(run), by="test")


@pytest.mark.slow
@pytest.mark.parametrize("is_known", [False, True])
def test_a_crash_at_any_change_leaves_the_old_or_the_new_state(
    is_known: bool, database: sqlite3.Connection, tmp_path: Path
) -> None:
    """Killed before each change of the file system, then registered again: one release, whole, at its own version."""
    run = finished_run(tmp_path / "run", export=True)

    def register_it(verdict: str | None = "deploy") -> None:
        with closing(open_database()) as own:
            register(own, run, name, about(run, verdict), by="test")

    name = "crashed"
    register_it(None) if is_known else None
    for number in each_crash(register_it):
        release, _ = register(database, run, name, about(run), by="test")
        assert (release.label, release.verdict) == (f"{name}@1", "deploy")
        release.check()
        assert sorted(path.name for path in release.folder.parent.iterdir()) == ["1"]
        name = f"crashed-{number}"
        register_it(None) if is_known else None
    assert number > 10


def killed_at(statement: int, work: Callable[[sqlite3.Connection], object]) -> int | None:
    """Do `work` in a forked process that is killed before this statement; return how many it has if it came so far."""
    pid = os.fork()
    if pid == 0:
        opened, seen = open_database(), 0

        def trace(text: str) -> None:
            nonlocal seen
            if text.startswith(("BEGIN", "INSERT", "DELETE", "UPDATE", "COMMIT")):
                if seen == statement:
                    os.kill(os.getpid(), signal.SIGKILL)
                seen += 1

        opened.set_trace_callback(trace)
        try:
            work(opened)
        finally:
            os._exit(seen)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return None if code == -signal.SIGKILL else code


@pytest.mark.slow
@pytest.mark.parametrize(
    ("work", "statements", "after"),  # a promotion is one line of the log, a rollback two
    [(rollback, 4, {"candidate": 4, "champion": 2, "previous": 1}), (promote, 3, {"champion": 4, "previous": 3})],
)
def test_a_kill_at_any_statement_leaves_the_old_or_the_new_state(
    work: Callable[..., object], statements: int, after: dict[str, int], own_home: Path, tmp_path: Path
) -> None:
    name = "helpdesk@4" if work is promote else "helpdesk"

    def state() -> tuple[dict[str, int], int, dict[str, int]]:
        with closing(open_database()) as database:
            return aliases(database), len(history(database, "helpdesk")), registry.champion_versions(database)

    with closing(open_database()) as database:
        champions(database, 1, 2, 3, folder=tmp_path)
        add(database, tmp_path, 4)
    old = state()  # no connection is open when a process is forked
    assert old[2] == {"helpdesk": 3}
    for statement in range(20):
        if (made := killed_at(statement, lambda opened: work(opened, name, by="test", reason="killed"))) is not None:
            assert made == statement == statements
            break
        assert state() == old
    assert (state()[0], state()[2]) == (after, {"helpdesk": after["champion"]})


def test_an_older_database_beside_newer_artefacts_and_the_other_way_round(
    database: sqlite3.Connection, tmp_path: Path
) -> None:
    """A backup of `hive.db` alone is restored: what it does not know is no release, and gives way to the next one."""
    promote(database, add(database, tmp_path, 1).label, by="ann")
    with closing(sqlite3.connect(tmp_path / "backup.db")) as backup:
        database.backup(backup)
    newer = promote(database, add(database, tmp_path, 2).label, by="ann")
    database.close()
    for name in ("hive.db-wal", "hive.db-shm"):
        (home() / name).unlink(missing_ok=True)
    shutil.copyfile(tmp_path / "backup.db", home() / "hive.db")
    with closing(open_database()) as restored:
        assert aliases(restored) == {"champion": 1} and registry.champion_versions(restored) == {"helpdesk": 1}
        assert newer.folder.is_dir() and [release.version for release in releases(restored)] == [1]
        third = add(restored, tmp_path, 3)
        third.check()
        assert third.label == "helpdesk@2" and third.adapter_sha256 != newer.adapter_sha256
        shutil.rmtree(third.folder)  # and a database whose artefacts were not in the backup
        with pytest.raises(HivetuneError, match="helpdesk@2 is damaged"):
            promote(restored, "helpdesk@2", by="ann")
        assert aliases(restored) == {"candidate": 2, "champion": 1}


def test_a_home_that_was_copied_or_restored_works(
    database: sqlite3.Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    promote(database, add(database, tmp_path, 1).label, by="ann")
    database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    shutil.copytree(home(), tmp_path / "restored")
    monkeypatch.setenv("HIVETUNE_HOME", str(tmp_path / "restored"))
    with closing(open_database()) as restored:
        release = find(restored, "helpdesk")
        release.check()
        assert release.folder.is_relative_to(tmp_path / "restored")


actions = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sampled_from(["deploy", "iterate", None])),
        st.tuples(st.just("promote"), st.integers(1, 6)),
        st.tuples(st.just("force"), st.integers(1, 6)),
        st.tuples(st.just("rollback"), st.just(0)),
        st.tuples(st.just("retire"), st.just(0)),
        st.tuples(st.just("prune"), st.just(0)),
    ),
    max_size=14,
)


@given(script=actions)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_is_done_the_registry_stays_sound(
    script: list[tuple[str, Any]], tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path_factory.mktemp("registry")
    monkeypatch.setenv("HIVETUNE_HOME", str(folder / "home"))
    with closing(open_database()) as database:
        added = 0
        for action, value in script:
            try:
                if action == "add":
                    added += 1
                    add(database, folder, added, value)
                elif action in ("promote", "force"):
                    reason = "forced" if action == "force" else ""
                    promote(database, f"helpdesk@{value}", by="x", reason=reason, force=action == "force")
                elif action == "rollback":
                    rollback(database, "helpdesk", by="x", reason="")
                elif action == "retire":
                    registry.retire(database, "helpdesk", by="x", reason="")
                else:
                    for release in releases(database):
                        if not release.aliases and not release.pruned:
                            registry.prune(database, release)
            except HivetuneError:
                pass  # a refusal changes nothing; what must hold is below
            assert_sound(database)


def assert_sound(database: sqlite3.Connection) -> None:
    known = {release.version: release for release in releases(database)}
    now = aliases(database)
    for version in now.values():
        known[version].check()  # whatever an alias names is there and whole
    assert registry.champion_versions(database) == ({"helpdesk": now["champion"]} if "champion" in now else {})
    if "champion" in now:
        champion = known[now["champion"]]
        assert not champion.withdrawn and now.get("previous") != champion.version
        moves = [m for m in history(database, "helpdesk") if m.action in registry.CROWNED]
        assert moves[-1].version == champion.version
        forced = [m for m in moves if m.version == champion.version and m.forced]
        assert champion.verdict == "deploy" or forced  # never what the gate refused, unless somebody said why
    assert "previous" not in now or not known[now["previous"]].withdrawn


def test_an_export_that_was_found_not_to_be_what_was_trained_is_not_registered(
    database: sqlite3.Connection, tmp_path: Path
) -> None:
    """By a proof of these bytes; one of an earlier file says nothing about the present one."""
    run = finished_run(tmp_path / "run", export=True)
    folder = run / "export" / "gguf-f16"
    manifest = hashlib.sha256((folder / "manifest.json").read_bytes()).hexdigest()
    proof = {"manifest_sha256": manifest, "holds": False, "problems": ["the loss is 9 instead of 2"]}
    write_json(folder / "proof.json", proof)
    with pytest.raises(HivetuneError, match="differs from the trained model: the loss is 9"):
        register(database, run, "helpdesk", about(run), by="test")
    assert releases(database) == []
    write_json(folder / "proof.json", {**proof, "manifest_sha256": "0" * 64})
    assert register(database, run, "helpdesk", about(run), by="test")[1]
