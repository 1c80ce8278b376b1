"""A listener is reached at its address and is bound to no other."""

import socket

import pytest

from impala_llm.pipeline.network.listener import address_towards, listen_at


def test_what_is_on_this_host_sees_loopback() -> None:
    assert address_towards("127.0.0.1", 30000) == "127.0.0.1"
    assert address_towards("localhost", 30000) in ("127.0.0.1", "::1")


def test_it_listens_at_one_address_and_a_free_port() -> None:
    first, second = listen_at("127.0.0.1"), listen_at("127.0.0.1")
    assert first.port != second.port
    for listener in (first, second):
        with (
            socket.socket(fileno=listener.descriptor) as bound,
            socket.create_connection((listener.address, listener.port), timeout=5),
        ):
            assert bound.getsockname() == ("127.0.0.1", listener.port)


def test_an_address_of_another_host_is_an_error() -> None:
    with pytest.raises(OSError):
        listen_at("192.0.2.1")
