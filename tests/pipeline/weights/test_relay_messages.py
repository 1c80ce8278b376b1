"""Messages of the relay come back as they were; contents that lie are refused, by a download as well."""

import contextlib
from pathlib import Path

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from impala_llm.pipeline.weights.board import WeightsError
from impala_llm.pipeline.weights.relay_download import Download
from impala_llm.pipeline.weights.relay_messages import (
    MAX_CHUNK_BYTES,
    SCHEMA_VERSION,
    ChunkRequest,
    Contents,
    Gone,
    Latest,
    LatestRequest,
    ManifestRequest,
    RelayWireError,
    WeightsChunk,
    decode_reply,
    decode_request,
    encode,
)
from tests.examples import examples


def make_contents(**changes: object) -> Contents:
    values = {"request": 1, "version": 0, "num_bytes": 3000, "header_checksum": 1, "checksums": (1, 2), "files": ()}
    return Contents(**{**values, **changes})  # type: ignore[arg-type]


def test_sizes_that_cannot_be_are_an_error_and_no_memory(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="more than all of"):
        Download(tmp_path, make_contents(num_bytes=2**62))
    assert list(tmp_path.iterdir()) == []


def test_two_relays_on_a_host_are_an_error(tmp_path: Path) -> None:
    with contextlib.closing(Download(tmp_path, make_contents())) as download:
        assert [chunk.length for chunk in download.chunks] == [3000]
        with pytest.raises(WeightsError, match="one relay a host"):
            Download(tmp_path, make_contents())
    Download(tmp_path, make_contents()).close()


@pytest.mark.parametrize(
    "message",
    [
        LatestRequest(2**63 - 1),
        ManifestRequest(0, 5, -1),
        ChunkRequest(3, 4, "model.safetensors", 0, MAX_CHUNK_BYTES),
        Latest(1, -1),
        make_contents(files=(("a.json", 5, 2**64 - 1),), checksums=(0, 2**64 - 1)),
        WeightsChunk(7),
        Gone(7, 3),
    ],
)
def test_messages_come_back_as_they_were(message: object) -> None:
    decode = decode_request if isinstance(message, LatestRequest | ManifestRequest | ChunkRequest) else decode_reply
    other = decode_reply if decode is decode_request else decode_request
    frame = encode(message)  # type: ignore[arg-type]
    assert decode(frame) == message
    with pytest.raises(RelayWireError):
        other(frame)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_bytes": 0},
        {"version": -1},
        {"version": True},
        {"header_checksum": 2**64},
        {"checksums": 5},
        {"checksums": (-1,)},
        {"checksums": ("x",)},
        {"files": (("a", 1),)},
        {"files": (("..", 1, 1),)},
        {"files": (("a/b", 1, 1),)},
        {"files": (("", 1, 1),)},
        {"files": (("a\0", 1, 1),)},
        {"files": (("model.safetensors", 1, 1),)},
        {"files": (("a", 1, 1), ("a", 1, 1))},
        {"files": (("a", 2**40, 1),)},
        {"files": "ab"},
    ],
)
def test_contents_that_lie_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(RelayWireError):
        make_contents(**changes)


@given(st.one_of(st.binary(max_size=100), st.lists(st.one_of(st.integers(), st.text(), st.binary()), max_size=7)))
@settings(max_examples=examples(120), deadline=None)
def test_any_bytes_give_a_message_or_an_error(noise: bytes | list[object]) -> None:
    frames = [noise] if isinstance(noise, bytes) else []
    if not isinstance(noise, bytes):
        for code in (1, 2, 3, 11, 12, 13, 14):
            with contextlib.suppress(OverflowError):
                frames.append(msgpack.packb([SCHEMA_VERSION, code, *noise]))
    for frame in frames:
        for decode in (decode_request, decode_reply):
            with contextlib.suppress(RelayWireError):
                decode(frame)
