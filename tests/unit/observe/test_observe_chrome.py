"""The trace file: what Perfetto reads."""

import json

from stageflow.observe import Event, write_chrome_trace
from stageflow.observe.chrome import chrome_trace

STEP = [
    Event(0, 0, "F", 0, 5.0, 5.001),
    Event(1, 1, "wait", 0, 5.0, 5.002),
    Event(1, 1, "F", 0, 5.002, 5.003),
    Event(1, 1, "B", 0, 5.003, 5.005),
    Event(0, 0, "I", 0, 5.006, 5.007),
    Event(0, 0, "W", 0, 5.007, 5.008),
]


def of_kind(trace: dict, ph: str) -> list[dict]:
    return [entry for entry in trace["traceEvents"] if entry["ph"] == ph]


def test_file_is_json_with_a_slice_per_event(tmp_path):
    write_chrome_trace(tmp_path / "trace.json", STEP, name="gpt")
    trace = json.loads((tmp_path / "trace.json").read_text())
    slices = of_kind(trace, "X")
    assert len(slices) == len(STEP)
    assert {(entry["name"], entry["tid"]) for entry in slices} == {
        ("0F0", 0), ("wait", 1), ("1F0", 1), ("1B0", 1), ("0I0", 0), ("0W0", 0),
    }  # fmt: skip
    names = {entry["args"]["name"] for entry in of_kind(trace, "M")}
    assert names == {"gpt", "worker 0", "worker 1"}


def test_times_are_microseconds_from_the_first_event():
    slices = {entry["name"]: entry for entry in of_kind(chrome_trace(STEP), "X")}
    assert round(slices["0F0"]["ts"], 3) == 0
    assert round(slices["1B0"]["ts"], 3) == 3000
    assert round(slices["1B0"]["dur"], 3) == 2000


def test_arrows_start_and_end_inside_their_slices():
    trace = chrome_trace(STEP)
    starts = {entry["id"]: entry for entry in of_kind(trace, "s")}
    ends = {entry["id"]: entry for entry in of_kind(trace, "f")}
    assert starts.keys() == ends.keys()
    slices = {entry["name"]: entry for entry in of_kind(trace, "X")}

    def around(arrow: dict) -> list[str]:
        own = {name: slice_ for name, slice_ in slices.items() if slice_["tid"] == arrow["tid"]}
        return [name for name, own_ in own.items() if own_["ts"] <= arrow["ts"] < own_["ts"] + own_["dur"]]

    inside = {
        (arrow["name"], edge): around(arrow)
        for edge, arrows in (("from", starts), ("to", ends))
        for arrow in arrows.values()
    }
    assert inside == {
        ("activations", "from"): ["0F0"],
        ("activations", "to"): ["1F0"],
        ("gradients", "from"): ["1B0"],
        ("gradients", "to"): ["0I0"],
    }
    assert all(starts[number]["ts"] <= ends[number]["ts"] for number in starts)


def test_arrows_follow_the_graph():
    events = [Event(s, s, "F", 0, s, s + 1) for s in range(3)]
    arrows = of_kind(chrome_trace(events, edges=[(0, 2)]), "s")
    assert [arrow["tid"] for arrow in arrows] == [0]
    assert [arrow["tid"] for arrow in of_kind(chrome_trace(events, edges=[(0, 2)]), "f")] == [2]


def test_no_events_is_an_empty_trace():
    assert chrome_trace([])["traceEvents"] == []
