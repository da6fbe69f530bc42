"""Ranks that look at the same records come to the same decision."""

import pytest

from stageflow.launch.agreement import Decision, Patience, Record, Trouble, decide, failing


def trouble(kind="error", when=1.0):
    return Trouble(kind, when, "ValueError: boom", "Traceback", stage=3, microbatch=1, action="3F1")


ENDED, RUNNING = Record(call=5), Record(call=4)


def test_records_survive_the_store():
    for record in (ENDED, Record(5, trouble()), Record(5, verdict="hung")):
        assert Record.loads(record.dumps().encode()) == record


def test_done_when_all_ended_well():
    assert decide([ENDED, ENDED], 5, patience_over=False) == Decision("done")


def test_waiting_while_one_has_not_ended():
    assert decide([ENDED, RUNNING], 5, patience_over=False) == Decision("waiting", missing=(1,))


def test_trouble_of_an_earlier_call_does_not_count():
    records = [ENDED, Record(4, trouble())]
    assert not failing(records, 5)
    assert decide(records, 5, patience_over=False) == Decision("waiting", missing=(1,))


@pytest.mark.parametrize(
    ("troubles", "decision"),
    [
        ([None, trouble()], Decision("failed", 1)),
        ([trouble("aborted", 0.5), trouble()], Decision("failed", 1)),
        ([trouble("transport", 0.5), trouble()], Decision("failed", 1)),
        ([trouble(when=0.5), trouble(when=0.7)], Decision("failed", 0)),
        ([trouble(when=0.7), trouble(when=0.7)], Decision("failed", 0)),
        ([trouble("timeout"), trouble("aborted")], Decision("hung", 0)),
    ],
)
def test_the_cause_among_several(troubles, decision):
    records = [Record(5, one) for one in troubles]
    assert failing(records, 5) is not None
    assert decide(records, 5, patience_over=False) == decision


@pytest.mark.parametrize(
    ("mine", "decision"),
    [
        (None, Decision("hung", missing=(1,))),
        (trouble("transport"), Decision("died", 0, missing=(1,))),
        (trouble("aborted"), Decision("died", 0, missing=(1,))),
        (trouble("error"), Decision("failed", 0, missing=(1,))),
        (trouble("timeout"), Decision("hung", 0, missing=(1,))),
    ],
)
def test_a_rank_that_never_ends(mine, decision):
    assert decide([Record(5, mine), RUNNING], 5, patience_over=True) == decision


def test_a_late_rank_comes_to_what_the_others_told_their_callers():
    assert decide([Record(5, verdict="hung"), ENDED], 5, patience_over=False) == Decision("hung")


def test_patience_starts_anew_whenever_a_status_changes():
    patience = Patience(timeout=10.0, grace=1.5, now=0.0)
    assert not patience.over(9.0, None, ["0F0 for 9.0 s", "1F0 for 8.0 s"])
    assert not patience.over(18.0, None, ["0F0 for 18.0 s", "1F0 for 17.0 s"])
    assert patience.over(19.0, None, ["0F0 for 19.0 s", "1F0 for 18.0 s"])


def test_patience_is_short_once_a_rank_failed():
    patience = Patience(timeout=10.0, grace=1.5, now=0.0)
    assert not patience.over(5.0, "error", None)
    assert not patience.over(6.4, "error", ["0F1", "1F1"])
    assert patience.over(6.5, "error", None)


def test_patience_is_shorter_where_only_a_connection_was_lost():
    patience = Patience(timeout=10.0, grace=1.5, now=0.0)
    assert not patience.over(5.0, "transport", None)
    assert patience.over(5.75, "transport", None)


def test_the_weightiest_trouble_counts():
    records = [Record(5, trouble("transport")), Record(5, trouble("aborted")), RUNNING]
    assert failing(records, 5) == "transport"
    assert failing([*records, Record(5, trouble("error"))], 5) == "error"
    assert failing([ENDED, Record(5, verdict="died")], 5) == "timeout"
