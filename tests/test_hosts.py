"""Endpoints: which are malformed, which can be reached from other hosts, and which ports the ranks get."""

from pathlib import Path

import pytest

from impala_llm.hosts import (
    TcpEndpoint,
    check_bind,
    check_connect,
    is_loopback_url,
    rank_endpoint,
    resolve,
    server_identity,
)

HERE = ["tcp://127.0.0.1:7400", "tcp://127.9.8.7:1", "tcp://[::1]:7400", "tcp://localhost:7400", "tcp://LOCALHOST:1"]
WILDCARDS = ["tcp://*:7400", "tcp://0.0.0.0:7400", "tcp://[::]:7400"]
ELSEWHERE = ["tcp://10.0.0.1:7400", "tcp://[fd00::2]:7400", "tcp://[fe80::1%eth0]:7400", "tcp://learner-7.example:7400"]
LOOKS_LIKE_HERE = ["tcp://localhost.example:7400", "tcp://lo:7400", "tcp://128.0.0.1:7400", "tcp://127.0.0.1.example:1"]
MALFORMED = [
    "127.0.0.1:7400", "tcp://127.0.0.1", "tcp://:7400", "tcp://127.0.0.1:0", "tcp://127.0.0.1:65536", "tcp://127.1:7400",
    "tcp://256.0.0.1:7400", "tcp://::1:7400", "tcp://[127.0.0.1]:7400", "tcp://127.0.0.1:7400 ", "tcp://127.0.0.1:٧",
    "tcp://127.0.0.1:0;10.0.0.1:7400", "tcp://user@127.0.0.1:7400", "udp://127.0.0.1:7400", "inproc://x", "ipc://@x",
    "ipc://*", "ipc://relative", "ws://127.0.0.1:7400", "", "tcp://a..b:7400", "tcp://a..:7400",
    f"tcp://{'x' * 64}.example:7400",
]  # fmt: skip


@pytest.mark.parametrize("endpoint", [*HERE, "tcp://127.0.0.1:*", "ipc:///dev/shm/run/learner-0.sock"])
def test_this_host_needs_no_keys(endpoint: str) -> None:
    for has_keys in (False, True):
        check_bind(endpoint, has_keys)
        if not endpoint.endswith("*"):
            check_connect(endpoint, has_keys)


@pytest.mark.parametrize("endpoint", [*WILDCARDS, *ELSEWHERE, *LOOKS_LIKE_HERE])
def test_others_are_served_with_keys_only(endpoint: str) -> None:
    check_bind(endpoint, has_keys=True)
    with pytest.raises(ValueError, match=r"without keys.*impala-llm keys.*learner\.public\.json.*pipeline\.keys="):
        check_bind(endpoint, has_keys=False)


@pytest.mark.parametrize("endpoint", [*ELSEWHERE, *LOOKS_LIKE_HERE])
def test_nothing_is_sent_to_others_without_keys(endpoint: str) -> None:
    check_connect(endpoint, has_keys=True)
    with pytest.raises(ValueError, match=r"without keys.*learner\.public\.json.*impala-llm keys.*pipeline\.keys"):
        check_connect(endpoint, has_keys=False)


@pytest.mark.parametrize("endpoint", [*WILDCARDS, "tcp://127.0.0.1:*"])
def test_nobody_connects_to_all_addresses(endpoint: str) -> None:
    with pytest.raises(ValueError, match="no address to connect to"):
        check_connect(endpoint, has_keys=True)


@pytest.mark.parametrize("endpoint", MALFORMED)
def test_what_is_malformed_is_refused_with_keys_too(endpoint: str) -> None:
    for check in (check_bind, check_connect):
        with pytest.raises(ValueError):
            check(endpoint, has_keys=True)


@pytest.mark.parametrize("endpoint", [*HERE[:4], *WILDCARDS, *ELSEWHERE, "tcp://127.0.0.1:*"])
def test_an_endpoint_is_written_as_it_was_read(endpoint: str) -> None:
    assert str(TcpEndpoint.parse(endpoint)) == endpoint


def test_ranks_listen_one_above_the_other() -> None:
    assert rank_endpoint("tcp://0.0.0.0:7400", 0) == "tcp://0.0.0.0:7400"
    assert rank_endpoint("tcp://[::1]:7400", 3) == "tcp://[::1]:7403"
    assert rank_endpoint("tcp://learner:65534", 1) == "tcp://learner:65535"


@pytest.mark.parametrize(("endpoint", "offset"), [("tcp://learner:65534", 2), ("tcp://learner:*", 0), ("learner:1", 0)])
def test_ranks_without_a_port_are_refused(endpoint: str, offset: int) -> None:
    with pytest.raises(ValueError, match=endpoint.replace("*", r"\*")):
        rank_endpoint(endpoint, offset)


def test_ranks_of_an_endpoint_in_a_file_are_those_of_what_it_holds_now(tmp_path: Path) -> None:
    file = tmp_path / "a+b"
    endpoint = rank_endpoint(f"@{file}", 2)
    for written, read in (("tcp://a:7400", "tcp://a:7402"), ("  tcp://b:1\n", "tcp://b:3")):
        file.write_text(written)
        assert resolve(endpoint) == read
    assert resolve(rank_endpoint("tcp://a:7400", 1)) == "tcp://a:7401"
    for wrong in ("", "tcp://a", "tcp://a:65535", f"@{file}"):
        file.write_text(wrong)
        with pytest.raises(ValueError):
            resolve(endpoint)


@pytest.mark.parametrize("host", ["[::ffff:127.0.0.1]", "localhost.", "LOCALHOST", "[::1]"])
def test_a_server_of_this_host_is_the_same_in_each_spelling(host: str) -> None:
    assert server_identity(f"http://{host}:30000") == server_identity("http://127.0.0.1:30000/")
    assert is_loopback_url(f"http://{host}:30000")


@pytest.mark.parametrize(
    ("host", "same"), [("[::ffff:10.0.0.1]", "10.0.0.1"), ("[fd00:0::2]", "[fd00::2]"), ("a.", "a")]
)
def test_a_server_of_another_host_is_the_same_in_each_spelling(host: str, same: str) -> None:
    assert server_identity(f"http://{host}:30000") == server_identity(f"http://{same}:30000")
    assert not is_loopback_url(f"http://{host}:30000")


def test_the_longest_name_of_a_host_is_taken() -> None:
    assert TcpEndpoint.parse(f"tcp://{'x' * 63}.example.:7400").host == f"{'x' * 63}.example."
