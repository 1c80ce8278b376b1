"""Sockets that reach beyond this host are encrypted or not opened; connections come back by themselves."""

import errno
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from impala_llm.pipeline.network.keys import load_actor_keys, load_learner_keys, make_keys
from impala_llm.pipeline.network.sockets import SocketTimes, dealer, router
from impala_llm.pipeline.network.zap_authenticator import ZapAuthenticator

ROOT = Path(__file__).parents[3]
MAX_BYTES = 1000
DEADLINE_MS = 20_000


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


def bound_to(listener: zmq.Socket) -> str:
    return listener.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()


def check_talk(listener: zmq.Socket, actor: zmq.Socket, text: bytes = b"hello") -> None:
    actor.send(text)
    assert listener.poll(DEADLINE_MS), "nothing has come"
    identity, received = listener.recv_multipart()
    assert received == text
    listener.send_multipart([identity, text.upper()])
    assert actor.poll(DEADLINE_MS) and actor.recv() == text.upper()


@pytest.mark.parametrize("endpoint", ["tcp://0.0.0.0:*", "tcp://*:*", "tcp://[::]:*", "tcp://10.0.0.1:7400"])
def test_nothing_is_opened_to_other_hosts_without_keys(context: zmq.Context, endpoint: str) -> None:
    with pytest.raises(ValueError, match="impala-llm keys"):
        router(context, endpoint, MAX_BYTES)


def test_nothing_is_sent_to_other_hosts_without_keys(context: zmq.Context) -> None:
    with pytest.raises(ValueError, match="without keys"):
        dealer(context, "tcp://10.0.0.1:7400", b"a", MAX_BYTES)


def test_an_endpoint_in_a_file_is_read_anew_by_each_socket_and_needs_keys_as_any(
    context: zmq.Context, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "learner"
    for content in (None, "tcp://10.0.0.1:7400", "@other"):
        if content is not None:
            file.write_text(content)
        nobody = dealer(context, f"@{file}+0", b"a", MAX_BYTES)
        with pytest.raises(zmq.Again):
            nobody.send(b"hello", zmq.NOBLOCK)  # it is connected to nothing
    # Once in ten seconds, and not at all where that was a moment ago.
    assert len(caplog.messages) <= 1 and all(str(file) in said for said in caplog.messages)
    for _ in range(2):
        listener = router(context, "tcp://127.0.0.1:*", MAX_BYTES)
        endpoint, _, port = bound_to(listener).rpartition(":")
        file.write_text(f"{endpoint}:{int(port) - 2}\n")
        check_talk(listener, dealer(context, f"@{file}+2", b"a", MAX_BYTES))


def test_the_family_of_a_learners_address_is_looked_up_until_it_is_known(
    context: zmq.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not at each connection: whoever connects anew would wait for a name server that does not answer."""
    looked_up: list[str] = []

    def getaddrinfo(host: str, *_: object, **__: object) -> list[tuple[object, ...]]:
        looked_up.append(host)
        if len(looked_up) == 1:
            raise OSError("the name server does not answer")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, 0))]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    for _ in range(4):
        dealer(context, "tcp://127.0.0.77:7400", b"a", MAX_BYTES)
    assert looked_up == ["127.0.0.77"] * 2


@pytest.mark.parametrize("address", ["127.0.0.1", "[::1]", "localhost"])
def test_this_host_is_served_in_clear_text(context: zmq.Context, address: str) -> None:
    try:
        listener = router(context, f"tcp://{address}:*", MAX_BYTES)
    except zmq.ZMQError as error:
        if address == "[::1]" and error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.ENODEV):
            pytest.skip("this host has no IPv6")
        raise
    port = bound_to(listener).rpartition(":")[2]
    check_talk(listener, dealer(context, f"tcp://{address}:{port}", b"a", MAX_BYTES))


@pytest.mark.parametrize("address", ["0.0.0.0", "*", "[::]"])
def test_all_addresses_are_served_with_keys(context: zmq.Context, address: str, tmp_path: Path) -> None:
    make_keys(tmp_path / "keys")
    authenticator = ZapAuthenticator(context, load_learner_keys(tmp_path / "keys"))
    try:
        listener = router(context, f"tcp://{address}:*", MAX_BYTES, authenticator)
    except zmq.ZMQError as error:
        authenticator.close()
        if address == "[::]" and error.errno == errno.EAFNOSUPPORT:
            pytest.skip("this host has no IPv6")
        raise
    port = bound_to(listener).rpartition(":")[2]
    keys = load_actor_keys(tmp_path / "keys")
    check_talk(listener, dealer(context, f"tcp://127.0.0.1:{port}", b"a", MAX_BYTES, keys))
    authenticator.close()


def test_what_cannot_be_bound_is_explained_and_closed(context: zmq.Context, tmp_path: Path) -> None:
    make_keys(tmp_path / "keys")
    authenticator = ZapAuthenticator(context, load_learner_keys(tmp_path / "keys"))
    with pytest.raises(zmq.ZMQError, match="no address of this host"):
        router(context, "tcp://learner.example:7400", MAX_BYTES, authenticator)
    listener = router(context, "tcp://127.0.0.1:*", MAX_BYTES)
    with pytest.raises(zmq.ZMQError, match=f"cannot listen at {bound_to(listener)}") as caught:
        router(context, bound_to(listener), MAX_BYTES, authenticator)
    assert caught.value.errno == zmq.EADDRINUSE
    authenticator.close()
    listener.close()
    context.term()  # would wait for sockets that were left open


def test_an_actor_that_returns_takes_its_place_over(context: zmq.Context) -> None:
    listener = router(context, "tcp://127.0.0.1:*", MAX_BYTES)
    # The first connection stays open all the while.
    actors = [dealer(context, bound_to(listener), b"a", MAX_BYTES)]
    check_talk(listener, actors[0], b"first")
    actors.append(dealer(context, bound_to(listener), b"a", MAX_BYTES))
    check_talk(listener, actors[1], b"second")


def test_the_largest_message_gets_through_in_clear_text_and_no_larger_one(context: zmq.Context) -> None:
    listener = router(context, "tcp://127.0.0.1:*", MAX_BYTES)
    actor, other = (dealer(context, bound_to(listener), name, MAX_BYTES) for name in (b"a", b"b"))
    check_talk(listener, actor, bytes(MAX_BYTES))
    check_talk(listener, other)
    monitor = actor.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    actor.send(bytes(MAX_BYTES + 1))
    assert monitor.poll(DEADLINE_MS)
    actor.disable_monitor()
    check_talk(listener, other)


# --- ipc


def test_a_socket_file_of_the_dead_is_no_obstacle(context: zmq.Context, tmp_path: Path) -> None:
    path = tmp_path / "learner.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))  # closing it leaves the file
    listener = router(context, f"ipc://{path}", MAX_BYTES)
    check_talk(listener, dealer(context, f"ipc://{path}", b"a", MAX_BYTES))


@pytest.mark.parametrize("backlog", [8, 0])
def test_the_address_of_the_living_is_not_stolen(context: zmq.Context, tmp_path: Path, backlog: int) -> None:
    path = tmp_path / "learner.sock"
    with socket.socket(socket.AF_UNIX) as living, socket.socket(socket.AF_UNIX) as waiting:
        living.bind(str(path))
        living.listen(backlog)
        waiting.connect(str(path))  # with a backlog of 0 the queue is full now
        with pytest.raises(zmq.ZMQError, match="somebody listens") as caught:
            router(context, f"ipc://{path}", MAX_BYTES)
        assert caught.value.errno == zmq.EADDRINUSE and path.is_socket()


def test_a_rank_keeps_its_address_while_it_lives(context: zmq.Context, tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/learner.sock"
    listener = router(context, endpoint, MAX_BYTES)
    with pytest.raises(zmq.ZMQError, match="somebody listens"):
        router(context, endpoint, MAX_BYTES)
    check_talk(listener, dealer(context, endpoint, b"a", MAX_BYTES))


def test_a_file_that_is_no_socket_is_left_alone(context: zmq.Context, tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("data")
    with pytest.raises(zmq.ZMQError, match="no socket: move it away"):
        router(context, f"ipc://{path}", MAX_BYTES)
    assert path.read_text() == "data"


MOVED = """
import os, sys, zmq
from pathlib import Path
from impala_llm.pipeline.network.keys import load_actor_keys, load_learner_keys
from impala_llm.pipeline.network.sockets import dealer, router
from impala_llm.pipeline.network.zap_authenticator import ZapAuthenticator

folder = Path(sys.argv[1])

def learner(address, port):
    Path("/etc/hosts").write_text(f"{address} learner-7.test\\n")
    context = zmq.Context()
    return router(context, f"tcp://{address}:{port}", 1000, ZapAuthenticator(context, load_learner_keys(folder)))

first = learner("127.0.0.1", "*")
port = first.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
actor = dealer(zmq.Context(), f"tcp://learner-7.test:{port}", b"a", 1000, load_actor_keys(folder))
actor.send(b"first")
assert first.poll(20_000)
first.close(linger=0)
second = learner("127.0.0.2", port)
# What is written before the lost connection is noticed is gone with it; actors send again what is not acknowledged.
for _ in range(300):
    actor.send(b"second")
    if second.poll(100):
        break
print(second.poll(0) and second.recv_multipart()[1], flush=True)
os._exit(0)
"""


def test_a_name_is_looked_up_again_when_its_host_has_gone(tmp_path: Path) -> None:
    """In a mount namespace with an /etc/hosts of its own."""
    make_keys(tmp_path / "keys")
    (tmp_path / "hosts").touch()
    mount = ["unshare", "--mount", "sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"', str(tmp_path / "hosts")]
    if shutil.which("unshare") is None or subprocess.run([*mount, "true"], capture_output=True).returncode != 0:
        pytest.skip("no right to make a mount namespace: the test of names needs root, and util-linux")
    command = [*mount, sys.executable, "-c", MOVED, str(tmp_path / "keys")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "b'second'", done.stderr


# --- the cable


class Cable:
    """A TCP proxy. While it is cut, what is sent disappears, and no connection is closed."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._whole = threading.Event()
        self._whole.set()
        self._done = False
        self._ends: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.num_connections = 0
        self.carried = bytearray()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            self.num_connections += 1
            far = socket.create_connection(self._target)
            self._ends += [near, far]
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._carry, args=(source, sink), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                if not self._whole.is_set():
                    return  # lost for ever: this connection must be given up by those at its ends
                self.carried += data
                sink.sendall(data)
            if self._whole.is_set():
                sink.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def cut(self) -> None:
        self._whole.clear()

    def mend(self) -> None:
        self._whole.set()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        for end in (self._listener, *self._ends):
            end.close()


def test_a_pulled_cable_is_noticed_and_the_connection_comes_back(context: zmq.Context, tmp_path: Path) -> None:
    times = SocketTimes(handshake_ms=300, heartbeat_ms=100, heartbeat_timeout_ms=300)
    make_keys(tmp_path / "keys")
    authenticator = ZapAuthenticator(context, load_learner_keys(tmp_path / "keys"))
    listener = router(context, "tcp://127.0.0.1:*", MAX_BYTES, authenticator)
    cable = Cable(("127.0.0.1", int(bound_to(listener).rpartition(":")[2])))
    keys = load_actor_keys(tmp_path / "keys")
    actor = dealer(context, f"tcp://127.0.0.1:{cable.port}", b"a", MAX_BYTES, keys, times=times)
    check_talk(listener, actor)
    monitor = actor.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    cable.cut()
    assert monitor.poll(DEADLINE_MS), "the actor did not notice"
    actor.disable_monitor()
    cable.mend()
    check_talk(listener, actor, b"again, in secret")
    assert cable.num_connections >= 2
    assert b"CURVE" in cable.carried and b"secret" not in cable.carried.lower()
    cable.close()
    authenticator.close()
