"""One of two threads leads at any time, no work is left undone, and both can be ended."""

import contextlib
import select
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

import pytest

from impala_llm.pipeline.transport.leader_follower import LeaderFollower


class Desk:
    """Queue of work that any thread may fill; the thread that serves notes which work it took."""

    def __init__(self, idle_s: float = 60.0) -> None:
        self.threads = LeaderFollower(idle_s)
        self.put: deque[int] = deque()
        self.taken: list[tuple[int, str]] = []
        self.num_inside = self.most_inside = 0
        self.on_wakeup: Callable[[], None] | None = None
        self.faults: dict[str, BaseException] = {}
        self.service = threading.Thread(target=self._work, name="service")
        self.service.start()

    def _work(self) -> None:
        with contextlib.suppress(ZeroDivisionError):
            self.threads.run(self.serve)

    def serve(self, timeout_s: float) -> None:
        self.num_inside += 1
        self.most_inside = max(self.most_inside, self.num_inside)
        if select.select([self.threads.wakeup], [], [], timeout_s)[0]:
            self.threads.clear_wakeup()
            if self.on_wakeup is not None:
                action, self.on_wakeup = self.on_wakeup, None
                action()
        if fault := self.faults.pop(threading.current_thread().name, None):
            self.num_inside -= 1
            raise fault
        while self.put:
            self.taken.append((self.put.popleft(), threading.current_thread().name))
        self.num_inside -= 1

    def ask(self, number: int, urgent: bool = False) -> None:
        self.put.append(number)
        self.threads.wake(urgent)

    def has(self, count: int) -> bool:
        return len(self.taken) >= count

    def wait_for(self, count: int) -> None:
        deadline = time.monotonic() + 20
        while not self.has(count):
            assert time.monotonic() < deadline, f"{self.taken} after 20 s"
            time.sleep(0.001)

    def close(self) -> None:
        self.threads.stop()
        self.service.join(20)
        assert not self.service.is_alive()
        self.threads.close()


@pytest.fixture
def desk() -> Iterator[Desk]:
    desk = Desk()
    yield desk
    desk.close()


def test_without_a_client_the_service_thread_serves(desk: Desk) -> None:
    for number in range(3):
        desk.ask(number)
        desk.wait_for(number + 1)
    assert desk.taken == [(0, "service"), (1, "service"), (2, "service")]


def test_a_client_serves_until_it_has_what_it_waits_for(desk: Desk) -> None:
    clerk = threading.Timer(0.05, desk.ask, (7,))
    clerk.start()
    # The service thread followed already when this woke the leader.
    desk.threads.lead(desk.serve, lambda: desk.has(1), timeout_s=20)
    clerk.join()
    assert desk.taken == [(7, "MainThread")]
    desk.threads.lead(desk.serve, lambda: True, timeout_s=20)
    assert desk.most_inside == 1


def test_a_client_waits_no_longer_than_it_said(desk: Desk) -> None:
    waits: list[float] = []
    desk.threads.lead(waits.append, lambda: len(waits) == 3, timeout_s=20)
    assert 20 >= waits[0] >= waits[1] >= waits[2] > 0, "less than the 60 s of a idle service thread"
    desk.threads.lead(desk.serve, lambda: False, timeout_s=0.05)  # comes back, though there is nothing to serve


@pytest.mark.parametrize("urgent", [False, True])
def test_the_service_thread_comes_back_when_the_client_stays_away(desk: Desk, urgent: bool) -> None:
    for number in range(20):
        desk.threads.lead(desk.serve, lambda: True, timeout_s=20)
        desk.ask(number, urgent)
        desk.wait_for(number + 1)
    assert desk.taken == [(number, "service") for number in range(20)]


def test_many_changes_of_the_leader_lose_nothing_and_never_overlap(desk: Desk) -> None:
    count = 3000
    clerk = threading.Thread(target=lambda: [desk.ask(number, number % 7 == 0) for number in range(count)])
    clerk.start()
    while not desk.has(count):
        wanted = len(desk.taken) + 1
        desk.threads.lead(desk.serve, lambda wanted=wanted: desk.has(wanted), timeout_s=0.02)
        if len(desk.taken) % 5 == 0:
            time.sleep(0.006)  # the service thread's turn
    clerk.join()
    assert [number for number, _ in desk.taken] == list(range(count))
    assert desk.most_inside == 1


def test_an_error_of_a_leading_client_is_the_clients_and_the_service_thread_continues(desk: Desk) -> None:
    desk.faults["MainThread"] = KeyboardInterrupt()
    clerk = threading.Timer(0.05, desk.threads.wake)
    clerk.start()
    with pytest.raises(KeyboardInterrupt):
        desk.threads.lead(desk.serve, lambda: False, timeout_s=20)
    clerk.join()
    desk.ask(1)
    desk.wait_for(1)


def test_a_client_that_is_interrupted_before_it_leads_leaves_the_service_thread_free(desk: Desk) -> None:
    main, interrupted = threading.main_thread().ident, threading.Event()
    assert main is not None

    def interrupt() -> None:
        """While the client thread waits for the lead, which the service thread has."""
        signal.pthread_kill(main, signal.SIGINT)
        assert interrupted.wait(20)

    desk.on_wakeup = interrupt
    with pytest.raises(KeyboardInterrupt):
        desk.threads.lead(desk.serve, lambda: False, timeout_s=20)
    interrupted.set()
    desk.ask(1)
    desk.wait_for(1)


def test_an_error_of_the_service_thread_keeps_no_client_waiting(desk: Desk) -> None:
    desk.faults["service"] = ZeroDivisionError()
    desk.threads.lead(desk.serve, lambda: False, timeout_s=20)
    desk.service.join(20)
    assert not desk.service.is_alive()


def test_stop_ends_both_threads_waits(desk: Desk) -> None:
    stopper = threading.Timer(0.05, desk.threads.stop)
    stopper.start()
    desk.threads.lead(desk.serve, lambda: False, timeout_s=20)
    stopper.join()
    desk.service.join(20)
    assert not desk.service.is_alive()
    desk.threads.lead(desk.serve, lambda: False, timeout_s=20)  # the service thread has ended: at once
    desk.threads.wake(urgent=True)
