"""What one run needed, later runs begin with, for thirty days."""

from hivetune.train.supervise.history import FORGET_S, remember_rungs, remembered_rungs

DAY_S = 86_400.0


def test_a_remembered_rung_expires_though_runs_finish_with_it() -> None:
    """Each finished run renewed its date: one hang that ended on `cpu` kept a nightly cycle there for ever."""
    remember_rungs("machine", "model", ["cpu"], now_s=0.0)
    for day in range(1, 30):
        rungs = remembered_rungs("machine", "model", day * DAY_S)
        assert rungs == ("cpu",)
        remember_rungs("machine", "model", rungs, day * DAY_S)
    assert remembered_rungs("machine", "model", FORGET_S) == ()


def test_a_rung_that_is_needed_again_begins_anew() -> None:
    remember_rungs("machine", "model", ["blas"], now_s=0.0)
    later = FORGET_S + DAY_S
    assert remembered_rungs("machine", "model", later) == ()
    remember_rungs("machine", "model", ["blas", "rank"], later)
    assert remembered_rungs("machine", "model", later + DAY_S) == ("blas",)
    assert remembered_rungs("another", "model", later) == ()
