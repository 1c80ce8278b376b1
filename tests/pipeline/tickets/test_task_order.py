"""The order of tasks, over ranks, epochs and restarts."""

import pytest

from impala_llm.pipeline.tickets.task_order import TaskOrder


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_each_epoch_holds_every_task_once_over_all_ranks(world_size: int) -> None:
    tasks = [5, 3, 9, 11, 2]
    orders = [TaskOrder(tasks, seed=1, rank=rank, world_size=world_size) for rank in range(world_size)]
    taken = {}
    for _ in range(30):
        for order in orders:
            task_id, group_id = order.next()
            assert group_id not in taken
            taken[group_id] = task_id
    epochs = [[taken[epoch * 5 + index] for index in range(5)] for epoch in range(6)]
    assert all(sorted(epoch) == sorted(tasks) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    single = TaskOrder(tasks, seed=1)
    assert [single.next()[0] for _ in range(30)] == [taken[i] for i in range(30)]


def test_the_order_goes_on_where_it_was() -> None:
    order = TaskOrder(range(7), group_size=2, seed=5)
    for _ in range(10):
        order.next()
    again = TaskOrder(range(7), group_size=2, seed=5)
    again.skip_to(order.num_taken)
    assert [again.next() for _ in range(10)] == [order.next() for _ in range(10)]


def test_bad_arguments_of_the_order_are_named() -> None:
    for arguments, expected in [
        (([],), "tasks is empty"),
        (([1, 1],), "repeats"),
        (([1], 0), "group_size is 0"),
        (([1], 1, 0, 2, 2), "rank is 2"),
    ]:
        with pytest.raises(ValueError, match=expected):
            TaskOrder(*arguments)
