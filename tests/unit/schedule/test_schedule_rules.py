"""What an action waits for, on a diamond: 0 feeds 1 and 2, both feed 3."""

import pytest

from stageflow.graph import StageGraph
from stageflow.schedule import KINDS, Action, depends_on, parse_action
from stageflow.schedule.rules import feeds, is_backward

DIAMOND = StageGraph(4, frozenset({(0, 1), (0, 2), (1, 3), (2, 3)}))


def split_is_stage_2(stage: int, microbatch: int) -> bool:
    return stage != 2


@pytest.mark.parametrize(
    ("action", "needs"),
    [
        ("0F5", set()),
        ("1F5", {"0F5"}),
        ("3F5", {"1F5", "2F5"}),
        ("3B5", {"3F5"}),
        ("1B5", {"1F5", "3B5"}),
        ("2I5", {"2F5", "3B5"}),
        ("2W5", {"2I5"}),
        ("0B5", {"0F5", "1B5", "2I5"}),
        ("0I5", {"0F5", "1B5", "2I5"}),
    ],
)
def test_depends_on(action: str, needs: set[str]) -> None:
    assert set(map(str, depends_on(parse_action(action), DIAMOND, split_is_stage_2))) == needs


def test_split_may_differ_between_microbatches_of_a_stage() -> None:
    whole = {(1, 0): True, (1, 1): False}
    chain = StageGraph.chain(2)
    assert Action("B", 1, 0) in depends_on(Action("B", 0, 0), chain, lambda s, m: whole[s, m])
    assert Action("I", 1, 1) in depends_on(Action("B", 0, 1), chain, lambda s, m: whole[s, m])


def test_feeds_is_depends_on_the_other_way_round() -> None:
    actions = [Action(kind, stage, 0) for kind in KINDS for stage in range(4)]
    for whole in (True, False):
        needed_by = {
            action: {a.stage for a in actions if action in depends_on(a, DIAMOND, lambda s, m: whole)}  # noqa: B023
            for action in actions
        }
        for action in actions:
            if action.kind in ("FB" if whole else "FIW"):
                assert set(feeds(action, DIAMOND)) == needed_by[action] - {action.stage}


def test_b_and_i_hand_gradients_on() -> None:
    assert [is_backward(Action(kind, 0, 0)) for kind in "FBIW"] == [False, True, True, False]
