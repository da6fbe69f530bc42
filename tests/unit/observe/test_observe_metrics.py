"""Figures from events, on steps small enough to work out by hand."""

import pytest

from stageflow.errors import InputError
from stageflow.observe import Event, Recorder, bubble, busy_share, idle_by_cause, summarize


def gpipe_two_by_two() -> list[Event]:
    """Forward 1 s, backward 2 s.

    worker 0   F0 F1 .  .  .  B0 B0 B1 B1
    worker 1   .  F0 F1 B0 B0 B1 B1 .  .
    """
    return [
        Event(0, 0, "F", 0, 0, 1),
        Event(0, 0, "F", 1, 1, 2),
        Event(1, 1, "F", 0, 1, 2),
        Event(1, 1, "F", 1, 2, 3),
        Event(1, 1, "B", 0, 3, 5),
        Event(1, 1, "B", 1, 5, 7),
        Event(0, 0, "B", 0, 5, 7),
        Event(0, 0, "B", 1, 7, 9),
    ]


def test_bubble_is_what_the_closed_form_says():
    # GPipe: (p - 1) / (m + p - 1) with p = m = 2
    assert bubble(gpipe_two_by_two()) == pytest.approx(1 / 3)


def test_busy_share_per_worker():
    assert busy_share(gpipe_two_by_two()) == pytest.approx([6 / 9, 6 / 9])


def test_idle_time_has_causes():
    first, second = idle_by_cause(gpipe_two_by_two())
    assert first == {"fill": 0, "activations": 0, "gradients": 3, "send": 0, "overhead": 0, "drain": 0}
    assert second == {"fill": 1, "activations": 0, "gradients": 0, "send": 0, "overhead": 0, "drain": 2}


def test_measured_waits_are_told_from_overhead():
    events = [
        Event(0, 0, "F", 0, 10.0, 11.0),
        Event(0, 0, "send", 0, 11.0, 11.1),
        Event(0, 0, "wait", 0, 11.2, 11.7),
        Event(0, 0, "B", 0, 11.8, 13.0),
        Event(0, 0, "wait", 1, 13.0, 13.5),
        Event(0, 0, "F", 1, 13.5, 14.0),
        Event(0, -1, "update", -1, 14.0, 15.0),
    ]
    (idle,) = idle_by_cause(events)
    assert idle["send"] == pytest.approx(0.1)
    assert idle["gradients"] == pytest.approx(0.5)
    assert idle["activations"] == pytest.approx(0.5)
    assert idle["overhead"] == pytest.approx(0.2)
    assert idle["drain"] == 0


def test_the_update_is_no_part_of_the_step():
    events = gpipe_two_by_two()
    longer = [*events, Event(0, -1, "update", -1, 9, 20), Event(1, 1, "wait", 0, -5, 1)]
    assert bubble(longer) == bubble(events)


@pytest.mark.parametrize("shift", [0.0, 1e6, -3.5])
def test_the_clock_has_no_meaning(shift: float):
    events = [event._replace(start=event.start + shift, end=event.end + shift) for event in gpipe_two_by_two()]
    assert bubble(events) == pytest.approx(1 / 3)


def test_busy_and_idle_add_up_to_the_span():
    summary = summarize(gpipe_two_by_two())
    for busy, causes in zip(summary.busy, summary.idle, strict=True):
        assert busy + sum(causes.values()) == pytest.approx(summary.span)


def test_a_worker_without_work_is_all_bubble():
    assert bubble(gpipe_two_by_two(), workers=3) == pytest.approx(1 - 12 / 27)
    assert busy_share(gpipe_two_by_two(), workers=3)[2] == 0


def test_overlapping_actions_are_not_counted_twice():
    assert bubble([Event(0, 0, "F", 0, 0, 2), Event(0, 0, "W", 1, 1, 3)]) == 0


def test_nothing_to_measure_is_refused():
    with pytest.raises(InputError, match="no action"):
        bubble([Event(0, 0, "wait", 0, 0, 1)])


def test_an_event_of_a_worker_that_is_not_there_is_refused():
    with pytest.raises(InputError, match=r"0F0 is of worker 3.*only 2 workers"):
        bubble([Event(3, 0, "F", 0, 0, 1)], workers=2)


def test_recorder_hands_over_each_event_once():
    ticks = iter(range(10))
    recorder = Recorder(2, clock=lambda: float(next(ticks)))
    recorder.record(5, "F", 0, recorder.clock(), recorder.clock())
    recorder.record(5, "B", 0, recorder.clock(), recorder.clock())
    assert len(recorder) == 2
    assert recorder.drain() == [Event(2, 5, "F", 0, 0.0, 1.0), Event(2, 5, "B", 0, 2.0, 3.0)]
    recorder.record(6, "F", 1, recorder.clock(), recorder.clock())
    assert recorder.drain() == [Event(2, 6, "F", 1, 4.0, 5.0)]
    assert recorder.drain() == []
