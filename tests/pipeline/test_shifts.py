"""One of two threads works at any time, nothing that is there to do lies undone, and both can be ended."""

import contextlib
import select
import threading
import time
from collections import deque
from collections.abc import Iterator

import pytest

from impala_llm.pipeline.shifts import Shifts


class Desk:
    """Work is put on it by anybody; whoever serves notes what it took and by which thread."""

    def __init__(self, idle_s: float = 60.0) -> None:
        self.shifts = Shifts(idle_s)
        self.put: deque[int] = deque()
        self.taken: list[tuple[int, str]] = []
        self.num_inside = self.most_inside = 0
        self.faults: dict[str, BaseException] = {}
        self.worker = threading.Thread(target=self._work, name="worker")
        self.worker.start()

    def _work(self) -> None:
        with contextlib.suppress(ZeroDivisionError):
            self.shifts.work(self.serve)

    def serve(self, timeout_s: float) -> None:
        self.num_inside += 1
        self.most_inside = max(self.most_inside, self.num_inside)
        if select.select([self.shifts.bell], [], [], timeout_s)[0]:
            self.shifts.silence()
        if fault := self.faults.pop(threading.current_thread().name, None):
            self.num_inside -= 1
            raise fault
        while self.put:
            self.taken.append((self.put.popleft(), threading.current_thread().name))
        self.num_inside -= 1

    def ask(self, number: int, urgent: bool = False) -> None:
        self.put.append(number)
        self.shifts.nudge(urgent)

    def has(self, count: int) -> bool:
        return len(self.taken) >= count

    def wait_for(self, count: int) -> None:
        deadline = time.monotonic() + 20
        while not self.has(count):
            assert time.monotonic() < deadline, f"{self.taken} after 20 s"
            time.sleep(0.001)

    def close(self) -> None:
        self.shifts.stop()
        self.worker.join(20)
        assert not self.worker.is_alive()
        self.shifts.close()


@pytest.fixture
def desk() -> Iterator[Desk]:
    desk = Desk()
    yield desk
    desk.close()


def test_without_a_guest_the_worker_serves(desk: Desk) -> None:
    for number in range(3):
        desk.ask(number)
        desk.wait_for(number + 1)
    assert desk.taken == [(0, "worker"), (1, "worker"), (2, "worker")]


def test_a_guest_serves_until_it_has_what_it_waits_for(desk: Desk) -> None:
    clerk = threading.Timer(0.05, desk.ask, (7,))
    clerk.start()
    # The worker had gone to rest before the bell rang for this.
    desk.shifts.help(desk.serve, lambda: desk.has(1), timeout_s=20)
    clerk.join()
    assert desk.taken == [(7, "MainThread")]
    desk.shifts.help(desk.serve, lambda: True, timeout_s=20)
    assert desk.most_inside == 1


def test_a_guest_waits_no_longer_than_it_said(desk: Desk) -> None:
    begin = time.monotonic()
    desk.shifts.help(desk.serve, lambda: False, timeout_s=0.05)
    assert time.monotonic() - begin >= 0.05


@pytest.mark.parametrize("urgent", [False, True])
def test_the_worker_comes_back_when_the_guest_stays_away(desk: Desk, urgent: bool) -> None:
    for number in range(20):
        desk.shifts.help(desk.serve, lambda: True, timeout_s=20)
        desk.ask(number, urgent)
        desk.wait_for(number + 1)
    assert desk.taken == [(number, "worker") for number in range(20)]


def test_many_changes_of_shift_lose_nothing_and_never_overlap(desk: Desk) -> None:
    count = 3000
    clerk = threading.Thread(target=lambda: [desk.ask(number, number % 7 == 0) for number in range(count)])
    clerk.start()
    while not desk.has(count):
        wanted = len(desk.taken) + 1
        desk.shifts.help(desk.serve, lambda wanted=wanted: desk.has(wanted), timeout_s=0.02)
        if len(desk.taken) % 5 == 0:
            time.sleep(0.006)  # the worker's turn
    clerk.join()
    assert [number for number, _ in desk.taken] == list(range(count))
    assert desk.most_inside == 1


def test_an_error_in_a_guests_shift_is_the_guests_and_the_worker_goes_on(desk: Desk) -> None:
    desk.faults["MainThread"] = KeyboardInterrupt()
    clerk = threading.Timer(0.05, desk.shifts.nudge)
    clerk.start()
    with pytest.raises(KeyboardInterrupt):
        desk.shifts.help(desk.serve, lambda: False, timeout_s=20)
    clerk.join()
    desk.ask(1)
    desk.wait_for(1)


def test_a_guest_that_is_interrupted_before_its_shift_leaves_the_worker_free(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(predicate: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(desk.shifts._changed, "wait_for", interrupted)
        desk.shifts.help(desk.serve, lambda: False, timeout_s=20)
    desk.ask(1)
    desk.wait_for(1)


def test_an_error_of_the_worker_keeps_no_guest_waiting(desk: Desk) -> None:
    desk.faults["worker"] = ZeroDivisionError()
    desk.shifts.help(desk.serve, lambda: False, timeout_s=20)
    desk.worker.join(20)
    assert not desk.worker.is_alive()


def test_stop_ends_a_rest_and_a_guests_wait(desk: Desk) -> None:
    stopper = threading.Timer(0.05, desk.shifts.stop)
    stopper.start()
    desk.shifts.help(desk.serve, lambda: False, timeout_s=20)
    stopper.join()
    desk.worker.join(20)
    assert not desk.worker.is_alive()
    desk.shifts.help(desk.serve, lambda: False, timeout_s=20)  # no worker any more: at once
    desk.shifts.nudge(urgent=True)
