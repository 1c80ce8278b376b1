"""The buffer: items that it keeps, gives up, hands out and remembers."""

import dataclasses
import math

import msgpack
import numpy as np
import pytest

from impala_llm.replay import OldestFirst, PrioritySampler, ReplayBuffer, Sampler
from impala_llm.trajectory import Trajectory
from tests.replay.builders import make_trajectory

BIG = 1 << 30


def make_buffer(
    sampler: Sampler | None = None,
    capacity: int = 1000,
    capacity_bytes: int = BIG,
    max_staleness: float = math.inf,
    max_replays: int = 10**9,
    seed: int = 0,
) -> ReplayBuffer:
    return ReplayBuffer(sampler or PrioritySampler(), capacity, capacity_bytes, max_staleness, max_replays, seed)


def fill(buffer: ReplayBuffer, count: int) -> None:
    for i in range(count):
        assert buffer.insert_all([[make_trajectory(ticket_id=i)]], version=0) == ()


def held_by(buffer: ReplayBuffer) -> dict[int, Trajectory]:
    return {t.unroll_id: t for t in buffer.snapshot().trajectories}


def tickets(items: object) -> list[int]:
    return [t.ticket_id for item in items for t in item.trajectories]


@pytest.mark.parametrize("sampler", [PrioritySampler(), OldestFirst()])
def test_draws_are_distinct_and_as_many_as_asked(sampler: Sampler) -> None:
    buffer = make_buffer(sampler)
    fill(buffer, 20)
    for count in (1, 7, 20):
        items = buffer.sample(count, version=0).items
        assert len(items) == len({item.item_id for item in items}) == count


def test_too_few_items_give_none_and_use_none_up() -> None:
    buffer = make_buffer(max_replays=1)
    fill(buffer, 3)
    assert buffer.sample(4, version=0).items == ()
    assert len(buffer) == 3


def test_the_same_seed_draws_the_same_and_another_one_does_not() -> None:
    draws = []
    for seed in (1, 1, 2):
        buffer = make_buffer(seed=seed)
        fill(buffer, 50)
        draws.append([tickets(buffer.sample(5, version=0).items) for _ in range(4)])
    assert draws[0] == draws[1] != draws[2]


def test_an_item_leaves_with_its_last_replay() -> None:
    buffer = make_buffer(max_replays=3)
    fill(buffer, 1)
    seen = [buffer.sample(1, version=0).items[0] for _ in range(3)]
    assert [(item.num_replays, item.is_last) for item in seen] == [(1, False), (2, False), (3, True)]
    assert len(buffer) == 0 and buffer.sample(1, version=0).items == ()
    buffer.update_advantages([seen[-1].item_id], [0.5])  # has left: passed over


def test_a_group_stays_together() -> None:
    buffer = make_buffer()
    buffer.insert_all([[make_trajectory(ticket_id=i) for i in range(4)]], version=0)
    buffer.insert_all([[make_trajectory(ticket_id=9)]], version=0)
    assert len(buffer) == 2 and buffer.stats().num_trajectories == 5
    items = buffer.sample(2, version=0).items
    assert sorted([t.ticket_id for t in item.trajectories] for item in items) == [[0, 1, 2, 3], [9]]


def spread(ticket_id: int, *versions: int) -> Trajectory:
    """versions: of the action tokens."""
    made = make_trajectory(ticket_id=ticket_id, length=len(versions) + 1)
    return dataclasses.replace(made, versions=np.array([-1, *versions], np.int32))


def test_an_item_is_stale_when_all_of_its_action_tokens_are_too_old() -> None:
    for versions, last_good in (((0, 3), 5), ((0, 0, 0, 0, 0, 3), 5), ((1,), 3), ((0, 1, 2), 4), ((3, 0, 0, 0), 5)):
        buffer = make_buffer(max_staleness=2)
        buffer.insert_all([[spread(7, *versions)]], version=3)
        for version in range(3, 8):
            evicted = buffer.evict_stale(version) if version > 3 else ()
            assert (len(buffer) == 1) == (version <= last_good), (versions, version)
            assert tickets(evicted) == ([7] if version == last_good + 1 and version > 3 else [])
    # Of a group all tokens together: those that have waited for one that took long are what it is compared with.
    buffer = make_buffer(max_staleness=2)
    buffer.insert_all([[spread(0, 0, 0, 0, 0), spread(1, 0, 3)]], version=5)
    assert len(buffer) == 1
    state = buffer.state_dict()
    again = make_buffer(max_staleness=2)
    again.load_state_dict(state, held_by(buffer))
    assert again.evict_stale(5) == () and tickets(again.evict_stale(6)) == [0, 1]


def test_what_loses_tokens_soonest_is_drawn_first() -> None:
    buffer = make_buffer(OldestFirst(), max_staleness=2)
    buffer.insert_all([[spread(0, 3, 3, 3)]], version=3)
    buffer.insert_all([[spread(1, 2, 2, 3)]], version=3)
    assert [t.ticket_id for item in buffer.sample(2, version=3).items for t in item.trajectories] == [1, 0]


def test_born_stale_is_returned_as_evicted() -> None:
    buffer = make_buffer(max_staleness=0)
    (evicted,) = buffer.insert_all([[make_trajectory(version=4, ticket_id=7)]], version=5)
    assert (evicted.reason, evicted.num_replays, tickets([evicted])) == ("stale", 0, [7])


def test_staleness_zero_keeps_only_the_current_version() -> None:
    buffer = make_buffer(max_staleness=0)
    fill(buffer, 2)
    assert len(buffer.evict_stale(0)) == 0
    assert [e.reason for e in buffer.evict_stale(1)] == ["stale", "stale"]


def test_a_full_buffer_gives_up_the_lowest_priority_then_the_oldest() -> None:
    sampler = PrioritySampler(advantage_exponent=1.0)
    buffer = make_buffer(sampler, capacity=4)
    fill(buffer, 4)
    ids = [item.item_id for item in sorted(buffer.sample(4, version=0).items, key=lambda item: tickets([item]))]
    buffer.update_advantages(ids, [0.5, 0.2, 0.9, 0.2])
    gone = [tickets(buffer.insert_all([[make_trajectory(ticket_id=i)]], version=0)) for i in (4, 5, 6)]
    assert gone == [[1], [3], [0]]


def test_a_full_queue_gives_up_the_oldest() -> None:
    buffer = make_buffer(OldestFirst(), capacity=3)
    for i, version in enumerate([2, 1, 2]):
        buffer.insert_all([[make_trajectory(version=version, ticket_id=i)]], version=2)
    evicted = buffer.insert_all(
        [[make_trajectory(version=2, ticket_id=3), make_trajectory(version=2, ticket_id=4)]], version=2
    )
    assert tickets(evicted) == [1, 0] and {e.reason for e in evicted} == {"capacity"}


def test_bytes_are_bounded() -> None:
    size = make_trajectory(length=10).nbytes
    buffer = make_buffer(capacity_bytes=3 * size)
    for i in range(3):
        assert buffer.insert_all([[make_trajectory(ticket_id=i, length=10)]], version=0) == ()
    assert buffer.stats().fill == 1.0
    evicted = buffer.insert_all([[make_trajectory(ticket_id=3, length=19)]], version=0)
    assert tickets(evicted) == [0, 1]
    assert buffer.stats().num_bytes <= 3 * size


def test_items_that_come_together_are_drawn_as_if_they_came_one_by_one() -> None:
    sampler = PrioritySampler(recency_tau=3.0, advantage_exponent=0.6, rarity_exponent=0.5, uniform_floor=0.1)
    together, apart = (make_buffer(sampler, capacity=200, max_replays=3) for _ in range(2))
    rng = np.random.default_rng(0)
    for version in range(40):
        items = [[make_trajectory(version=version, ticket_id=i, signature=f"s{i % 7}")] for i in range(11)]
        if version < 18:  # as long as there is room
            assert together.insert_all(items, version) == ()
            assert [apart.insert_all([item], version) for item in items] == [()] * 11
        samples = [buffer.sample(8, version) for buffer in (together, apart)]
        assert samples[0].item_ids.tolist() == samples[1].item_ids.tolist()
        np.testing.assert_allclose(samples[0].weights, samples[1].weights, rtol=1e-12)
        values = rng.random(8)
        for buffer in (together, apart):
            buffer.update_advantages(samples[0].item_ids, values)


def test_items_that_come_together_make_room_among_the_old_ones() -> None:
    sampler = PrioritySampler(advantage_exponent=1.0, rarity_exponent=1.0)
    buffer = make_buffer(sampler, capacity=4)
    for i, signature in enumerate("aabb"):
        buffer.insert_all([[make_trajectory(ticket_id=i, signature=signature)]], version=0)
    buffer.update_advantages([0, 1, 2, 3], [0.3, 0.9, 0.5, 0.4])
    # 0 has the lowest p (0.3/2); without it 1 has 0.9, 2 and 3 have 0.25 and 0.2; without 3 then, 2 has 0.5
    gone = buffer.insert_all([[make_trajectory(ticket_id=i, signature="c")] for i in (4, 5, 6)], version=0)
    assert tickets(gone) == [0, 3, 2]


def test_a_signature_that_has_lost_an_item_is_spared() -> None:
    buffer = make_buffer(PrioritySampler(advantage_exponent=1.0, advantage_epsilon=1e-9, rarity_exponent=1.0), 12)
    for i in range(12):
        buffer.insert_all([[make_trajectory(ticket_id=i, signature="ab"[i // 6])]], version=0)
    buffer.update_advantages(range(12), [6.0, 6.1, 6.2, 6.3, 6.4, 6.5, 6.6, 6.7, 6.8, 6.9, 7.0, 7.1])
    # p of "a" begins at 6.0/6, of "b" at 6.6/6; without 0 and 6 they begin at 6.1/5 and 6.7/5
    gone = buffer.insert_all([[make_trajectory(ticket_id=i, signature="c")] for i in (12, 13, 14)], version=0)
    assert tickets(gone) == [0, 6, 1]


def test_more_items_than_the_buffer_holds_make_room_for_each_other() -> None:
    buffer = make_buffer(OldestFirst(), capacity=3)
    gone = buffer.insert_all([[make_trajectory(ticket_id=i)] for i in range(7)], version=0)
    assert tickets(gone) == [0, 1, 2, 3]
    assert len(buffer) == 3


def test_an_item_larger_than_the_whole_buffer_is_evicted_and_makes_no_room() -> None:
    """An actor with other settings may send one: no reason to end the learner."""
    buffer = make_buffer(capacity=3, capacity_bytes=1000)
    fill(buffer, 2)
    large = [[make_trajectory(ticket_id=7)] * 4, [make_trajectory(ticket_id=8, length=100)]]
    evicted = buffer.insert_all([*large, [make_trajectory(ticket_id=9)]], version=0)
    assert [(item.reason, item.trajectories[0].ticket_id) for item in evicted] == [("capacity", 7), ("capacity", 8)]
    assert sorted(tickets(buffer.sample(3, version=0).items)) == [0, 1, 9]


def test_nothing_is_inserted_where_one_item_is_refused() -> None:
    buffer = make_buffer(OldestFirst())
    with pytest.raises(ValueError, match="sampled by 3"):
        buffer.insert_all([[make_trajectory()], [make_trajectory(version=3)]], version=2)
    assert len(buffer) == 0 and buffer.insert_all([], version=0) == ()


def test_a_queue_hands_out_the_oldest_version_first() -> None:
    buffer = make_buffer(OldestFirst(), max_replays=1)
    for i, version in enumerate([2, 0, 1, 0]):
        buffer.insert_all([[make_trajectory(version=version, ticket_id=i)]], version=2)
    items = buffer.sample(3, version=2).items
    assert tickets(items) == [1, 3, 2]
    assert [item.weight for item in items] == [1.0, 1.0, 1.0]


def test_rarity_counts_the_items_in_the_buffer() -> None:
    buffer = make_buffer(PrioritySampler(rarity_exponent=1.0))
    for i, signature in enumerate(["a", "a", "a", "b"]):
        buffer.insert_all([[make_trajectory(ticket_id=i, signature=signature)]], version=0)
    buffer.insert_all([[make_trajectory(ticket_id=4, signature="a")]], version=0, signatures=["b"])
    # p: a 1/3 each of three, b 1/2 each of two, so N·P is 5/6 and 5/4
    weights = {tickets([item])[0]: item.weight for item in buffer.sample(5, version=0).items}
    expected = {0: 1.0, 1: 1.0, 2: 1.0, 3: (5 / 6) / (5 / 4), 4: (5 / 6) / (5 / 4)}
    assert weights == pytest.approx(expected)


def test_an_unknown_advantage_counts_as_the_largest_known() -> None:
    buffer = make_buffer(PrioritySampler(advantage_exponent=1.0, advantage_epsilon=1e-9))
    fill(buffer, 2)
    assert [item.weight for item in buffer.sample(2, version=0).items] == [1.0, 1.0]  # nothing is known yet
    buffer.update_advantages([0, 1], [0.2, 0.8])
    buffer.insert_all([[make_trajectory(ticket_id=2)]], version=0)
    weights = {tickets([item])[0]: item.weight for item in buffer.sample(3, version=0).items}
    assert weights == pytest.approx({0: 1.0, 1: 0.25, 2: 0.25})


@pytest.mark.parametrize("exponent", [0.0, 0.4, 1.0])
def test_importance_weights_are_their_definition(exponent: float) -> None:
    buffer = make_buffer(PrioritySampler(advantage_exponent=1.0, advantage_epsilon=1e-9, uniform_floor=0.1))
    fill(buffer, 3)
    buffer.update_advantages([0, 1, 2], [0.1, 0.3, 0.6])
    probabilities = [0.9 * p + 0.1 / 3 for p in (0.1, 0.3, 0.6)]
    items = buffer.sample(2, version=0, importance_exponent=exponent).items
    raw = [(3 * probabilities[tickets([item])[0]]) ** -exponent for item in items]
    assert [item.weight for item in items] == pytest.approx([w / max(raw) for w in raw])


def test_stats() -> None:
    buffer = make_buffer(capacity=8)
    assert buffer.stats().oldest_version is None and buffer.stats().fill == 0.0
    buffer.insert_all([[make_trajectory(version=3), make_trajectory(version=5)]], version=5)
    buffer.insert_all([[make_trajectory(version=4)]], version=5)
    stats = buffer.stats()
    assert (stats.num_trajectories, stats.oldest_version, stats.fill) == (3, 4, 3 / 8)


def busy_buffer(seed: int) -> tuple[ReplayBuffer, np.random.Generator]:
    sampler = PrioritySampler(recency_tau=3.0, advantage_exponent=0.6, rarity_exponent=0.5, uniform_floor=0.1)
    return make_buffer(sampler, capacity=40, max_staleness=4, max_replays=3, seed=seed), np.random.default_rng(seed)


def step(buffer: ReplayBuffer, rng: np.random.Generator, version: int) -> list[tuple[int, float]]:
    """Insert, sample and update as a learner would; returns what was seen."""
    seen: list[tuple[int, float]] = []
    for _ in range(6):
        group = [
            make_trajectory(version=version, signature=f"s{rng.integers(4)}", ticket_id=int(rng.integers(10**6)))
            for _ in range(rng.integers(1, 4))
        ]
        seen += [(e.item_id, e.num_replays) for e in buffer.insert_all([group], version)]
    sample = buffer.sample(5, version, importance_exponent=0.7)
    seen += [(item.item_id, item.weight) for item in sample.items]
    seen += [(e.item_id, e.num_replays) for e in sample.evicted]
    buffer.update_advantages([item.item_id for item in sample.items], rng.random(len(sample.items)).tolist())
    return seen


def test_the_books_balance_over_a_long_life() -> None:
    buffer, rng = busy_buffer(5)
    alive: dict[int, int] = {}
    next_id = 0
    for version in range(30):
        for _ in range(6):
            evicted = buffer.insert_all([[make_trajectory(version=max(0, version - int(rng.integers(6))))]], version)
            alive[next_id] = 0
            next_id += 1
            for item in evicted:
                assert alive.pop(item.item_id) == item.num_replays
        sample = buffer.sample(4, version)
        for item in sample.evicted:
            assert alive.pop(item.item_id) == item.num_replays
        for item in sample.items:
            assert all(0 <= version - t.oldest_version <= 4 for t in item.trajectories)
            alive[item.item_id] += 1
            assert item.num_replays == alive[item.item_id] and item.is_last == (item.num_replays == 3)
            if item.is_last:
                del alive[item.item_id]
        assert len(buffer) == buffer.stats().num_trajectories == len(alive) <= 40
    assert next_id > 100


def test_a_saved_buffer_goes_on_as_if_nothing_had_happened() -> None:
    def pack_array(value: object) -> object:
        assert isinstance(value, np.ndarray), value
        return {"__array__": value.tobytes(), "dtype": value.dtype.str, "shape": list(value.shape)}

    def unpack_array(value: dict) -> object:
        if "__array__" in value:
            return np.frombuffer(value["__array__"], np.dtype(value["dtype"])).reshape(value["shape"])
        return value

    buffer, rng = busy_buffer(9)
    for version in range(6):
        step(buffer, rng, version)
    saved = msgpack.unpackb(msgpack.packb(buffer.state_dict(), default=pack_array), object_hook=unpack_array)
    restored, _ = busy_buffer(1234)
    restored.load_state_dict(saved, held_by(buffer))
    assert restored.stats() == buffer.stats()
    twin = np.random.default_rng()
    twin.bit_generator.state = rng.bit_generator.state
    for version in range(6, 12):
        assert step(restored, twin, version) == step(buffer, rng, version)


def test_a_share_of_the_batch_is_replayed_and_the_rest_fresh() -> None:
    buffer = ReplayBuffer(PrioritySampler(rarity_exponent=1.0), 100, BIG, max_replays=3, separate_replayed=True)
    fill(buffer, 6)
    first = buffer.sample(4, version=0, max_replayed=3)  # nothing to replay yet: all are fresh
    assert first.num_replays.tolist() == [1] * 4
    second = buffer.sample(4, version=0, max_replayed=2)
    assert second.num_replays.tolist() == [1, 1, 2, 2]
    assert set(second.item_ids[2:]) <= set(first.item_ids) and set(second.item_ids[:2]).isdisjoint(first.item_ids)
    assert buffer.sample(4, version=0, max_replayed=3).items == ()  # nothing is fresh: the caller waits
    third = buffer.sample(4, version=0, max_replayed=4)
    assert set(third.num_replays) <= {2, 3} and third.is_last.tolist() == (third.num_replays == 3).tolist()
    buffer.insert_all([[make_trajectory(ticket_id=6)]], version=0)
    assert sorted(buffer.sample(2, version=0, max_replayed=1).num_replays == 1) == [False, True]


def test_weights_of_a_divided_batch_are_those_within_its_classes() -> None:
    buffer = ReplayBuffer(
        PrioritySampler(advantage_exponent=1.0, advantage_epsilon=1e-9), 100, BIG, max_replays=9, separate_replayed=True
    )
    fill(buffer, 2)
    buffer.sample(2, version=0, max_replayed=0)
    fill(buffer, 3)
    buffer.update_advantages(range(5), [0.25, 0.75, 0.2, 0.2, 0.6])
    items = buffer.sample(5, version=0, max_replayed=2).items
    density = {0: 2 * 0.25, 1: 2 * 0.75, 2: 3 * 0.2, 3: 3 * 0.2, 4: 3 * 0.6}  # N·P in the class
    expected = {item_id: 0.5 / x for item_id, x in density.items()}
    assert {item.item_id: item.weight for item in items} == pytest.approx(expected)


def test_a_divided_buffer_goes_on_after_a_restart() -> None:
    def make(seed: int) -> ReplayBuffer:
        sampler = PrioritySampler(3.0, 0.6, 0.01, 0.5, 0.1)
        return ReplayBuffer(sampler, 60, BIG, 5, max_replays=3, seed=seed, separate_replayed=True)

    def go_on(buffer: ReplayBuffer, versions: range) -> list[tuple[int, float]]:
        seen = []
        for version in versions:
            for i in range(8):
                signature, ticket_id = f"s{(7 * version + i * i) % 5}", 8 * version + i
                buffer.insert_all(
                    [[make_trajectory(version=version, signature=signature, ticket_id=ticket_id)]], version
                )
            sample = buffer.sample(8, version, 0.5, max_replayed=3)
            buffer.update_advantages(sample.item_ids, [0.1 * (item_id % 7) for item_id in sample.item_ids.tolist()])
            seen += [(item.item_id, item.weight) for item in sample.items]
        return seen

    buffer, restored = make(3), make(4)
    go_on(buffer, range(12))
    restored.load_state_dict(buffer.state_dict(), held_by(buffer))
    assert go_on(restored, range(12, 30)) == go_on(buffer, range(12, 30))


def test_max_replayed_goes_with_separate_classes() -> None:
    buffer = make_buffer()
    fill(buffer, 2)
    with pytest.raises(ValueError, match="max_replayed is 1 and separate_replayed is False"):
        buffer.sample(1, version=0, max_replayed=1)
    buffer = ReplayBuffer(PrioritySampler(), 10, BIG, separate_replayed=True)
    with pytest.raises(ValueError, match="max_replayed is None and separate_replayed is True"):
        buffer.sample(1, version=0)
    with pytest.raises(ValueError, match="max_replayed is 2"):
        buffer.sample(1, version=0, max_replayed=2)


def test_old_items_are_found_among_many_new_ones() -> None:
    """Also an item that outlives many others."""
    buffer = make_buffer(PrioritySampler(advantage_exponent=1.0, advantage_epsilon=1e-9), capacity=8)
    fill(buffer, 8)
    buffer.update_advantages([3], [5.0])
    for i in range(500):
        (gone,) = buffer.insert_all([[make_trajectory(ticket_id=100 + i)]], version=0)
        assert gone.item_id != 3
        buffer.update_advantages([8 + i], [1e-3])
    buffer.update_advantages([3, 9, 507], [2.0, 7.0, 4.0])  # 9 has left
    weights = {item.item_id: item.weight for item in buffer.sample(8, version=0).items}
    assert weights[507] == pytest.approx(weights[3] / 2) and 9 not in weights


def test_a_smaller_buffer_refuses_the_state() -> None:
    buffer = make_buffer()
    fill(buffer, 5)
    with pytest.raises(ValueError, match="holds 5 trajectories .* raise the capacity"):
        make_buffer(capacity=4).load_state_dict(buffer.state_dict(), held_by(buffer))
    with pytest.raises(ValueError, match="format is 0"):
        make_buffer().load_state_dict(buffer.state_dict() | {"format": 0}, {})


def test_a_snapshot_stays_as_it_was_while_the_buffer_goes_on() -> None:
    buffer, rng = busy_buffer(9)
    for version in range(6):
        step(buffer, rng, version)
    snapshot = buffer.snapshot()
    twin = np.random.default_rng()
    twin.bit_generator.state = rng.bit_generator.state
    expected = [step(buffer, rng, version) for version in range(6, 12)]
    restored, _ = busy_buffer(1234)
    restored.load_state_dict(buffer.state_dict(snapshot), {t.unroll_id: t for t in snapshot.trajectories})
    assert [step(restored, twin, version) for version in range(6, 12)] == expected


def test_an_item_without_its_trajectory_is_left_out() -> None:
    buffer, restored = make_buffer(), make_buffer()
    fill(buffer, 5)
    held = held_by(buffer)
    del held[3]
    restored.load_state_dict(buffer.state_dict(), held)
    assert sorted(tickets(restored.sample(4, version=0).items)) == [0, 1, 2, 4]


@pytest.mark.parametrize(
    ("setting", "value"),
    [("capacity_trajectories", 0), ("capacity_bytes", 0), ("max_staleness", -1), ("max_replays", 0), ("seed", -1)],
)
def test_impossible_settings_are_named(setting: str, value: int) -> None:
    good = {"sampler": OldestFirst(), "capacity_trajectories": 1, "capacity_bytes": 1}
    with pytest.raises(ValueError, match=f"{setting} is {value}"):
        ReplayBuffer(**(good | {setting: value}))


def test_impossible_calls_are_named() -> None:
    buffer = make_buffer(capacity=3, capacity_bytes=1000)
    with pytest.raises(ValueError, match="trajectories is empty"):
        buffer.insert_all([[]], version=0)
    with pytest.raises(ValueError, match="version is 1, but a token was sampled by 2"):
        buffer.insert_all([[make_trajectory(version=2)]], version=1)
    buffer.insert_all([[make_trajectory(version=2)]], version=2)
    for call in (
        buffer.evict_stale,
        lambda v: buffer.sample(1, v),
        lambda v: buffer.insert_all([[make_trajectory()]], v),
    ):
        with pytest.raises(ValueError, match="version is 1 after 2"):
            call(1)
    with pytest.raises(ValueError, match="num_items is 0"):
        buffer.sample(0, version=2)
    with pytest.raises(ValueError, match="num_items is 4"):
        buffer.sample(4, version=2)
    with pytest.raises(ValueError, match="importance_exponent is 1.1"):
        buffer.sample(1, version=2, importance_exponent=1.1)
    for value in (-0.1, math.nan, math.inf):
        with pytest.raises(ValueError, match="abs_advantages of item 0"):
            buffer.update_advantages([0], [value])
    with pytest.raises(ValueError, match="abs_advantages has 2"):
        buffer.update_advantages([0], [1.0, 2.0])
