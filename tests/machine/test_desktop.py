"""Who uses the machine: logind's answers as `loginctl` prints them, and the processor time of others."""

from pathlib import Path

import pytest

from hivetune.machine.desktop import CoreUse, OtherPrograms, cores_of_others, person_idle_s

NOW_S = 1_800_000_000.0
DESK = {"Remote": "no", "Class": "user", "Active": "yes", "IdleHint": "no", "IdleSinceHint": "0"}


@pytest.fixture
def loginctl(tmp_path: Path):
    """A `loginctl` that answers as systemd's does: no test machine is sure to have logind and a session."""

    def make(*sessions: dict[str, str]) -> str:
        shown = "".join(
            f"{number}) printf '{''.join(f'{key}={value}' + chr(92) + 'n' for key, value in about.items())}' ;;\n"
            for number, about in enumerate(sessions)
        )
        listed = "".join(f"     {number} 1000 ada   seat0 tty2\n" for number in range(len(sessions)))
        program = tmp_path / "loginctl"
        program.write_text(
            f"#!/bin/sh\nif [ $1 = list-sessions ]; then printf '%s' '{listed}'; exit; fi\ncase $2 in\n{shown}esac\n"
        )
        program.chmod(0o755)
        return str(program)

    return make


def test_a_person_who_types(loginctl) -> None:
    assert person_idle_s(NOW_S, loginctl(DESK)) == 0.0


def test_a_person_who_left_half_an_hour_ago(loginctl) -> None:
    since = str(int((NOW_S - 1800) * 1e6))
    assert person_idle_s(NOW_S, loginctl({**DESK, "IdleHint": "yes", "IdleSinceHint": since})) == 1800.0


@pytest.mark.parametrize("elsewhere", [{"Remote": "yes"}, {"Class": "greeter"}, {"Active": "no"}])
def test_who_is_not_at_this_desk_does_not_count(loginctl, elsewhere: dict[str, str]) -> None:
    assert person_idle_s(NOW_S, loginctl({**DESK, **elsewhere})) == float("inf")


def test_of_two_the_one_who_types_counts(loginctl) -> None:
    away = {**DESK, "IdleHint": "yes", "IdleSinceHint": "1"}
    assert person_idle_s(NOW_S, loginctl(away, DESK)) == 0.0


def test_nothing_tells(tmp_path: Path) -> None:
    assert person_idle_s(NOW_S, str(tmp_path / "missing")) is None
    broken = tmp_path / "loginctl"
    broken.write_text("#!/bin/sh\necho 'System has not been booted with systemd' >&2\nexit 1\n")
    broken.chmod(0o755)
    assert person_idle_s(NOW_S, str(broken)) is None


def test_a_burst_is_no_use_of_the_machine() -> None:
    """Looks every two seconds; others take both cores for four seconds, and later for a minute."""
    others, all_s, found = OtherPrograms(), 0.0, []
    for look in range(100):
        busy = look in (20, 21) or look >= 60
        all_s += 4.0 if busy else 0.0
        found.append(others.cores(CoreUse(2.0 * look, all_s)))
    assert max(found[:15]) == 0.0
    assert 0.0 < max(found[:60]) < 0.3
    assert found[-1] == 2.0


def test_only_what_others_take_counts() -> None:
    assert cores_of_others(CoreUse(0.0, 100.0, 40.0), CoreUse(10.0, 160.0, 60.0)) == 4.0
    assert cores_of_others(CoreUse(0.0, 100.0, 40.0), CoreUse(10.0, 110.0, 60.0)) == 0.0
    assert cores_of_others(CoreUse(5.0, 100.0), CoreUse(5.0, 110.0)) == 0.0
