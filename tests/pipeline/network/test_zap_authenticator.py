"""Only authorised keys get through, who does not is counted, and nothing of it ends the server or is left behind."""

import os
import resource
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest
import zmq

from impala_llm.pipeline.network.keys import ActorKeys, load_actor_keys, load_learner_keys, make_keys
from impala_llm.pipeline.network.sockets import SocketTimes, router
from impala_llm.pipeline.network.sockets import dealer as make_dealer
from impala_llm.pipeline.network.zap_authenticator import ZapAuthenticator, user_id

MAX_BYTES = 1000
ANYWHERE = "tcp://127.0.0.1:*"
# What a refused peer has sent never leaves it: its context would wait for that at its end.
dealer = partial(make_dealer, times=SocketTimes(linger_ms=0))


@contextmanager
def new_context() -> Iterator[zmq.Context]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


class Server:
    """A guarded router in a context of its own."""

    def __init__(self, folder: Path, endpoint: str = ANYWHERE, handshake_ms: int = 10_000) -> None:
        self.context = zmq.Context()
        self.authenticator = ZapAuthenticator(self.context, load_learner_keys(folder))
        times = SocketTimes(handshake_ms)
        self.socket = router(self.context, endpoint, MAX_BYTES, self.authenticator, times=times)
        self.endpoint = self.socket.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()
        self.address = ("127.0.0.1", int(self.endpoint.rpartition(":")[2]))

    def receive(self, timeout_s: float = 20.0) -> tuple[str | None, bytes]:
        """Name of the sender's key and what it sent."""
        assert self.socket.poll(int(1000 * timeout_s)), "nothing has come"
        frames = self.socket.recv_multipart(copy=False)
        return user_id(frames[1]), frames[1].bytes

    def has_refused(self, total: int) -> None:
        """Wait for so many refusals in all; nothing may have come through."""
        wait_for(lambda: self.authenticator.refused >= total)
        assert not self.socket.poll(0)

    def close(self) -> None:
        self.socket.close(linger=0)
        self.authenticator.close()
        self.context.term()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys", ["a", "b"])
    return tmp_path / "keys"


@pytest.fixture
def server(folder: Path) -> Iterator[Server]:
    server = Server(folder)
    yield server
    server.close()


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    with new_context() as context:
        yield context


def wait_for(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.005)


def talks(server: Server, context: zmq.Context, keys: ActorKeys, name: str) -> None:
    """A new actor with these keys sends something and gets an answer."""
    with dealer(context, server.endpoint, name.encode(), MAX_BYTES, keys) as actor:
        actor.send(b"hello")
        assert server.receive() == (name, b"hello")
        server.socket.send_multipart([name.encode(), b"welcome"])
        assert actor.poll(20_000) and actor.recv() == b"welcome"


def strangers() -> ActorKeys:
    public, secret = zmq.curve_keypair()
    return ActorKeys(secret, public, zmq.curve_keypair()[0])


def test_authorised_actors_get_in_and_are_known_by_name(server: Server, context: zmq.Context, folder: Path) -> None:
    for name in ("a", "b"):
        talks(server, context, load_actor_keys(folder, name), name)
    assert server.authenticator.refused == 0


def test_without_a_key_nothing_gets_through(server: Server, context: zmq.Context, folder: Path) -> None:
    with dealer(context, server.endpoint, b"x", MAX_BYTES) as plain:
        plain.send(b"hello")
        server.has_refused(1)
    talks(server, context, load_actor_keys(folder, "a"), "a")


def test_an_actor_with_another_learners_key_gets_nothing(server: Server, context: zmq.Context, folder: Path) -> None:
    own = load_actor_keys(folder, "a")
    with dealer(
        context, server.endpoint, b"a", MAX_BYTES, ActorKeys(own.secret, own.public, strangers().learner)
    ) as lost:
        lost.send(b"hello")
        server.has_refused(2)  # it tries again and again
    talks(server, context, own, "a")


def test_a_key_that_is_not_authorised_gets_nothing(
    server: Server, context: zmq.Context, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stranger, learner = strangers(), load_actor_keys(folder, "a").learner
    with dealer(
        context, server.endpoint, b"x", MAX_BYTES, ActorKeys(stranger.secret, stranger.public, learner)
    ) as other:
        other.send(b"hello")
        server.has_refused(1)
        assert not other.poll(0)
    talks(server, context, load_actor_keys(folder, "a"), "a")
    (line,) = [record.getMessage() for record in caplog.records]
    assert "127.0.0.1" in line and stranger.public.decode() in line and "not authorised" in line


def test_an_actor_does_not_talk_to_another_learner(context: zmq.Context, folder: Path, tmp_path: Path) -> None:
    make_keys(tmp_path / "other", ["a"])
    other = Server(tmp_path / "other")
    with dealer(context, other.endpoint, b"a", MAX_BYTES, load_actor_keys(folder, "a")) as actor:
        actor.send(b"hello")
        other.has_refused(1)
    other.close()


def test_a_revoked_key_opens_no_new_connection_and_one_put_back_does(folder: Path, context: zmq.Context) -> None:
    server = Server(folder, handshake_ms=200)
    keys, file = load_actor_keys(folder, "a"), folder / "authorised" / "a.public.json"
    with dealer(context, server.endpoint, b"old", MAX_BYTES, keys) as old:
        old.send(b"before")
        assert server.receive() == ("a", b"before")
        file.rename(folder / "away")
        with dealer(context, server.endpoint, b"new", MAX_BYTES, keys) as new:
            new.send(b"hello")
            server.has_refused(1)
            old.send(b"the old connection stands")
            assert server.receive() == ("a", b"the old connection stands")
            (folder / "away").rename(file)
            # The refused actor tries again by itself.
            assert server.receive() == ("a", b"hello")
    server.close()


def test_nobody_gets_in_when_the_authenticator_has_gone(server: Server, context: zmq.Context, folder: Path) -> None:
    server.authenticator.close()
    with dealer(context, server.endpoint, b"a", MAX_BYTES, load_actor_keys(folder, "a")) as actor:
        monitor = actor.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        actor.send(b"hello")
        assert monitor.poll(20_000)
        actor.disable_monitor()
    assert not server.socket.poll(0)


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
INVALID_HANDSHAKES = {
    "http": b"GET / HTTP/1.1\r\nHost: learner\r\n\r\n",
    "old ZeroMQ": b"\x01\x00\x05hello",
    "random": bytes(range(255, -1, -1)) * 40,
    "no command": GREETING + b"\x00\x05hello",
    "unknown command": GREETING + b"\x04\x06\x05HELLO",
    "no HELLO": GREETING + b"\x04\xc8\x05HELLO\x01\x00" + bytes(192),
    "endless": GREETING + b"\x06" + b"\xff" * 8 + bytes(4096),
    "NULL": GREETING.replace(b"CURVE", b"NULL\0") + b"\x04\x06\x05READY",
}


@pytest.mark.parametrize("sent", INVALID_HANDSHAKES.values(), ids=INVALID_HANDSHAKES)
def test_a_peer_without_a_valid_handshake_is_cut_off_and_counted(
    server: Server, context: zmq.Context, folder: Path, sent: bytes
) -> None:
    with dealer(context, server.endpoint, b"b", MAX_BYTES, load_actor_keys(folder, "b")) as actor:
        actor.send(b"before")
        assert server.receive() == ("b", b"before")
        with socket.create_connection(server.address) as peer:
            with suppress(OSError):  # it may have been cut off already
                peer.sendall(sent)
                peer.shutdown(socket.SHUT_WR)
            server.has_refused(1)
        actor.send(b"after")
        assert server.receive() == ("b", b"after")
    assert server.authenticator.refused == 1
    talks(server, context, load_actor_keys(folder, "a"), "a")


def test_a_silent_peer_is_cut_off(folder: Path) -> None:
    server = Server(folder, handshake_ms=100)
    with socket.create_connection(server.address) as peer:
        server.has_refused(1)
        peer.settimeout(20)
        while peer.recv(100):
            pass
    server.close()


STRANGERS_MEET = """
import os, resource, socket, sys
from pathlib import Path
import zmq
from impala_llm.pipeline.network.keys import load_actor_keys
sys.path.insert(0, sys.argv[1])
from test_zap_authenticator import Server, dealer, talks, wait_for

_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
folder = Path(sys.argv[2])
server = Server(folder)
with zmq.Context() as context, dealer(context, server.endpoint, b"a", 1000, load_actor_keys(folder, "a")) as actor:
    actor.send(b"before")
    assert server.receive() == ("a", b"before")
    print(*server.address, flush=True)
    sys.stdin.readline()

    def has_room():  # once libzmq has closed what was shut down
        try:
            return len(os.listdir("/proc/self/fd")) <= 155
        except OSError:
            return False

    wait_for(has_room)
    files = [open(os.devnull) for _ in range(40)]
    actor.send(b"still here")
    assert server.receive() == ("a", b"still here")
    print(flush=True)
    sys.stdin.read()
    talks(server, context, load_actor_keys(folder, "b"), "b")
server.close()
"""


def test_connections_of_strangers_leave_descriptors_to_the_process(folder: Path) -> None:
    """They are silent, so that each would have ten seconds for its handshake."""
    learner = subprocess.Popen(
        [sys.executable, "-c", STRANGERS_MEET, os.path.dirname(__file__), str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert learner.stdin is not None and learner.stdout is not None
    with ExitStack() as open_connections:
        host, port = learner.stdout.readline().split()
        strangers = [open_connections.enter_context(socket.create_connection((host, int(port)))) for _ in range(500)]
        ended = select.poll()
        for stranger in strangers:
            ended.register(stranger, select.POLLRDHUP)
        wait_for(lambda: len(ended.poll(0)) >= 500 - 150)  # of 200 descriptors
        learner.stdin.write("\n")
        learner.stdin.flush()
        assert learner.stdout.readline() == "\n", "the learner has ended"
    learner.communicate(timeout=60)
    assert learner.returncode == 0


def test_a_connection_that_is_ended_for_want_of_descriptors_is_counted_and_reported_once(
    server: Server,
    context: zmq.Context,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with monkeypatch.context() as scarce:
        scarce.setattr(resource, "getrlimit", lambda _which: (1, 1))
        with socket.create_connection(server.address) as peer, suppress(OSError):
            while peer.recv(100):
                pass
    talks(server, context, load_actor_keys(folder, "a"), "a")
    with socket.create_connection(server.address) as peer:
        peer.sendall(INVALID_HANDSHAKES["http"])
    server.has_refused(2)
    assert server.authenticator.refused == 2
    first, second = caplog.messages
    assert "a connection was ended at once" in first and "it does not speak" in second


def test_every_refusal_counts_and_few_are_logged(
    server: Server, context: zmq.Context, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    talks(server, context, load_actor_keys(folder, "a"), "a")
    for _ in range(200):
        with socket.create_connection(server.address) as peer, suppress(OSError):
            peer.sendall(INVALID_HANDSHAKES["http"])
    wait_for(lambda: server.authenticator.refused >= 200)
    talks(server, context, load_actor_keys(folder, "a"), "a")
    assert server.authenticator.refused == 200
    assert 1 <= len(caplog.records) <= 4


def test_an_oversized_message_ends_its_connection_and_nothing_else(
    server: Server, context: zmq.Context, folder: Path
) -> None:
    with ExitStack() as stack:
        a, b = (
            stack.enter_context(dealer(context, server.endpoint, name.encode(), 1 << 20, load_actor_keys(folder, name)))
            for name in "ab"
        )
        a.send(bytes(MAX_BYTES))
        assert server.receive() == ("a", bytes(MAX_BYTES))
        b.send(b"hello")
        assert server.receive() == ("b", b"hello")
        monitor = a.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        a.send(bytes(MAX_BYTES + 1))
        b.send(b"I am still here")
        assert server.receive() == ("b", b"I am still here")
        # It comes back, and what was too large is gone.
        assert monitor.poll(20_000)
        a.disable_monitor()
        a.send(b"smaller")
        assert server.receive() == ("a", b"smaller")


def test_actors_come_back_when_the_learner_does(context: zmq.Context, folder: Path) -> None:
    first = Server(folder)
    with dealer(context, first.endpoint, b"a", MAX_BYTES, load_actor_keys(folder, "a")) as actor:
        actor.send(b"first")
        assert first.receive() == ("a", b"first")
        first.close()
        second = Server(folder, first.endpoint)
        actor.send(b"second")
        assert second.receive() == ("a", b"second")
        second.close()


def test_servers_of_one_process_do_not_mix(folder: Path, tmp_path: Path, context: zmq.Context) -> None:
    make_keys(tmp_path / "other", ["c"])
    one, two = Server(folder), Server(tmp_path / "other")
    talks(one, context, load_actor_keys(folder, "a"), "a")
    talks(two, context, load_actor_keys(tmp_path / "other", "c"), "c")
    with dealer(context, two.endpoint, b"a", MAX_BYTES, load_actor_keys(folder, "a")) as actor:
        actor.send(b"hello")
        two.has_refused(1)
    assert one.authenticator.refused == 0
    two.close()
    talks(one, context, load_actor_keys(folder, "b"), "b")
    one.close()


def test_one_authenticator_guards_several_sockets(server: Server, context: zmq.Context, folder: Path) -> None:
    with router(server.context, ANYWHERE, MAX_BYTES, server.authenticator) as second:
        port = int(second.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").rpartition(b":")[2])
        for total, address in enumerate((server.address, ("127.0.0.1", port)), start=1):
            with socket.create_connection(address) as peer:
                peer.sendall(INVALID_HANDSHAKES["http"])
                server.has_refused(total)
    talks(server, context, load_actor_keys(folder, "a"), "a")


def test_a_plain_socket_of_the_same_context_needs_no_key(server: Server, context: zmq.Context, tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/plain.sock"
    with router(server.context, endpoint, MAX_BYTES) as plain, dealer(context, endpoint, b"x", MAX_BYTES) as actor:
        actor.send(b"hello")
        assert plain.poll(20_000)
        frames = plain.recv_multipart(copy=False)
        assert frames[1].bytes == b"hello" and user_id(frames[1]) is None


def test_a_context_has_one_authenticator(server: Server, folder: Path) -> None:
    with pytest.raises(zmq.ZMQError) as caught:
        ZapAuthenticator(server.context, load_learner_keys(folder))
    assert caught.value.errno == zmq.EADDRINUSE


def leftovers() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), threading.active_count()


@pytest.mark.parametrize("order", ["socket first", "authenticator first", "context first", "twice", "unused", "busy"])
def test_nothing_is_left_behind(folder: Path, order: str) -> None:
    before = leftovers()
    for _ in range(5):
        server = Server(folder)
        if order == "busy":
            # Peers in the middle of everything, and messages that nobody takes.
            with (
                new_context() as context,
                dealer(context, server.endpoint, b"a", MAX_BYTES, load_actor_keys(folder, "a")) as actor,
            ):
                actor.send(b"hello")
                server.receive()
                with socket.create_connection(server.address) as peer:
                    peer.sendall(GREETING)
                    server.socket.send_multipart([b"a", b"never read"])
                    server.close()
        elif order == "authenticator first":
            server.authenticator.close()
            server.socket.close()
            server.context.term()
        elif order == "context first":
            server.socket.close()
            server.context.term()
            server.authenticator.close()
        elif order == "unused":
            server.socket.close()
            server.close()
        else:
            server.close()
            if order == "twice":
                server.authenticator.close()
    wait_for(lambda: leftovers() == before)
