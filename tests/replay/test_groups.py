"""Groups: complete, closed short, late, dropped."""

import pytest

from impala_llm.replay.groups import GroupAssembler
from impala_llm.trajectory import Trajectory
from tests.replay.builders import make_trajectory


def member(group_id: int, ticket_id: int, score: float = 0.0) -> Trajectory:
    return make_trajectory(group_id=group_id, ticket_id=ticket_id, score=score)


def test_a_group_is_handed_out_when_complete_in_the_order_of_its_tickets() -> None:
    groups = GroupAssembler(3)
    assert groups.add(member(1, 12, 1.0)) is None
    assert groups.add(member(2, 20)) is None
    assert groups.add(member(1, 10, 0.25)) is None
    assert groups.open_groups() == {1: 2, 2: 1} and len(groups) == 3
    group = groups.add(member(1, 11, 0.4))
    assert group is not None
    assert [t.ticket_id for t in group] == [10, 11, 12]
    assert groups.open_groups() == {2: 1}


def test_groups_of_one_pass_through() -> None:
    group = GroupAssembler(1).add(member(5, 1, 0.5))
    assert group is not None and [t.score for t in group] == [0.5]


def test_closed_short_a_group_is_used_from_two_members_on() -> None:
    groups = GroupAssembler(4)
    for ticket_id in (3, 1):
        groups.add(member(1, ticket_id, ticket_id / 4))
    groups.add(member(2, 9))
    group, dropped = groups.close_short(1)
    assert group is not None and [t.ticket_id for t in group] == [1, 3] and dropped == ()
    group, dropped = groups.close_short(2)
    assert group is None and [t.ticket_id for t in dropped] == [9]
    assert groups.close_short(3) == (None, ())  # nobody ever came
    assert len(groups) == 0


def test_late_and_double_members_are_refused() -> None:
    groups = GroupAssembler(3)
    groups.add(member(1, 1))
    with pytest.raises(ValueError, match="ticket_id 1 is already in group_id 1"):
        groups.add(member(1, 1))
    groups.close_short(1)
    assert groups.is_closed(1) and not groups.is_closed(2)
    with pytest.raises(ValueError, match="group_id 1 was closed short"):
        groups.add(member(1, 2))


def test_which_groups_were_closed_short_is_remembered() -> None:
    groups = GroupAssembler(3)
    groups.add(member(1, 1, 0.5))
    groups.close_short(7)
    restored = GroupAssembler(3)
    restored.load_state_dict(groups.state_dict())
    assert restored.is_closed(7) and restored.open_groups() == {}
    for ticket in (1, 2):
        assert restored.add(member(1, ticket, 0.5)) is None
    group = restored.add(member(1, 3, 0.5))
    assert group is not None and [t.ticket_id for t in group] == [1, 2, 3]


def test_impossible_sizes_are_named() -> None:
    with pytest.raises(ValueError, match="group_size is 0"):
        GroupAssembler(0)


def test_a_group_of_which_nobody_can_come_any_more_is_forgotten() -> None:
    groups = GroupAssembler(2)
    groups.close_short(1, is_over=True)
    assert not groups.is_closed(1) and groups.state_dict() == {"closed_short": [], "open": []}
