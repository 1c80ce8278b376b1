"""Every decoder of the pipeline that reads from a socket or from shared memory, ready to be fuzzed."""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import msgpack
import numpy as np

from impala_llm.pipeline.tickets.ledger import Ticket
from impala_llm.pipeline.transport import messages
from impala_llm.pipeline.weights import relay_messages, safetensors_layout, slots, tensor_writing
from tests.system.fuzz.inputs import Decoder, Source
from tests.system.fuzz.memory import (
    arena_decoder,
    journal_decoder,
    kernel_decoder,
    ledger_decoder,
    record_decoder,
    replay_decoder,
)
from tests.system.fuzz.sequences import sequence_decoder


def wire_decoder(source: Source, folder: Path) -> Decoder:
    ticket = Ticket(1, 2, 3, 4, 5)
    valid = [
        messages.encode(message)
        for message in (
            messages.Hello("actor-0", 7, (1, 2), "actor-0"),
            messages.TicketRequest(5),
            messages.DescriptorBatch.of([messages.Descriptor(1, 2, 3, 40, -5), messages.Descriptor(2, 2, 48, 40, 5)]),
            messages.TicketFailed(3, "reason"),
            messages.Heartbeat((1, 2, 3), {"a": 1.5, "b": 2}),
            messages.Goodbye(),
            messages.Engines(("http://127.0.0.1:30000", "http://b"), (1, 2)),
            messages.HelloWanted(),
            messages.Grant((ticket, ticket)),
            messages.Ack((1, 2, 3)),
            messages.Refused(3, "reason"),
            messages.WeightsAnnounced(6),
            messages.Shutdown("reason"),
            messages.Revoked((1, 2)),
            messages.RecordsWanted((1, 2)),
            messages.EvaluationRequest(5),
            messages.EvaluationResult(1, 2, 0.5, True, 30, 2, 3, 4),
            messages.EvaluationFailed(1, 2, "reason"),
            messages.EvaluationGrant(1, 3, 0.5, (2, 4)),
        )
    ]

    def make() -> bytes:
        rng = source.rng
        kind = rng.random()
        if kind < 0.05:
            return source.noise()
        frame = rng.choice(valid)
        if kind < 0.1:
            return source.changed(frame)
        if kind < 0.35:
            body = source.changed(frame[4:], rng.choice(valid))
        else:
            body = frame[4:12] + source.packed(source.replaced(msgpack.unpackb(frame[12:]), first=2))
        return struct.pack("<I", zlib.crc32(body)) + body

    def decode(data: bytes) -> None:
        message = messages.decode(data)
        assert repr(messages.decode(messages.encode(message))) == repr(message), "it does not come back equal"

    return Decoder(make, decode, (messages.WireError,))


def safetensors_decoder(source: Source, folder: Path) -> Decoder:
    layout = safetensors_layout.plan({"a": ("F32", (2, 3)), "b": ("BF16", (4,)), "c": ("U8", ()), "d": ("I64", (0, 7))})
    valid = layout.header + bytes(layout.num_bytes - len(layout.header))
    table = json.loads(layout.header[8:])

    def make() -> bytes:
        rng = source.rng
        kind = rng.random()
        if kind < 0.05:
            return source.noise()
        if kind < 0.5:
            return source.changed(valid)
        changed = {name: dict(entry) for name, entry in table.items()}
        entry = changed[rng.choice(list(changed))]
        key = rng.choice(("dtype", "shape", "data_offsets", "other"))
        old = entry.get(key)
        entry[key] = source.replaced(old) if isinstance(old, list) and rng.random() < 0.7 else source.value()
        text = source.said_in_json(changed)
        return struct.pack("<Q", len(text)) + text + valid[len(layout.header) :]

    return Decoder(make, lambda data: safetensors_layout.parse(memoryview(data)), (safetensors_layout.LayoutError,))


def board_decoder(source: Source, folder: Path) -> Decoder:
    """An input: M and a manifest, L and a pointer to the latest version, or W, a manifest's length, it and weights."""
    (folder / "slot-0").mkdir()
    slot = slots.Slot(folder, 0)
    layout = safetensors_layout.plan({"a": ("F32", (2, 3)), "b": ("U8", (5,))})
    tensors = {"a": ("F32", (2, 3), np.arange(24, dtype=np.uint8)), "b": ("U8", (5,), np.arange(5, dtype=np.uint8))}
    weights = np.zeros(layout.num_bytes, np.uint8)
    sums = tensor_writing.write_version(layout, weights, tensors)
    manifest = slots.WeightsManifest(3, layout.num_bytes, *sums).to_json()
    slots.write_latest(folder, 0, 3)
    pointer = os.readlink(os.fsencode(folder / "latest"))

    def make() -> bytes:
        rng = source.rng
        if rng.random() < 0.4:
            text = source.changed(manifest) if rng.random() < 0.5 else manifest
            data = source.changed(weights.tobytes()) if rng.random() < 0.7 else weights.tobytes()
            return b"W" + struct.pack("<I", len(text)) + text + data
        if rng.random() < 0.5:
            return b"L" + source.changed(pointer)
        if rng.random() < 0.5:
            return b"M" + source.changed(manifest)
        values = json.loads(manifest)
        values[rng.choice(list(values))] = source.value()
        return b"M" + source.said_in_json(source.value() if rng.random() < 0.1 else values)

    def decode(data: bytes) -> None:
        if data[:1] == b"L":
            (folder / "latest").unlink()
            os.symlink(data[1:].replace(b"\0", b"0")[:1000] or b"/", os.fsencode(folder / "latest"))
            slots.read_latest(folder)
            return
        (length,) = struct.unpack_from("<I", data, 1) if data[:1] == b"W" else (len(data),)
        begin = 5 if data[:1] == b"W" else 1
        slot.manifest.write_bytes(data[begin : begin + length])
        found = slot.read_manifest()
        if data[:1] == b"W" and found is not None:
            slot.weights.write_bytes(data[begin + length :])
            slots.Slot(folder, 0).mapped(found).tensors(found, "here", verify=True)

    return Decoder(make, decode, (slots.WeightsError,))


def relay_decoder(
    source: Source, messages: Sequence[relay_messages.Request | relay_messages.Reply], decode: Callable[[bytes], object]
) -> Decoder:
    valid = [relay_messages.encode(message) for message in messages]

    def make() -> bytes:
        rng = source.rng
        kind = rng.random()
        if kind < 0.05:
            return source.noise()
        if kind < 0.35:
            return source.changed(rng.choice(valid), rng.choice(valid))
        return source.packed(source.replaced(msgpack.unpackb(rng.choice(valid)), first=2))

    def check(data: bytes) -> None:
        message = decode(data)
        assert decode(relay_messages.encode(message)) == message, "it does not come back equal"  # type: ignore[arg-type]

    return Decoder(make, check, (relay_messages.RelayWireError,))


def relay_request_decoder(source: Source, folder: Path) -> Decoder:
    messages = (
        relay_messages.LatestRequest(1),
        relay_messages.ManifestRequest(2, 3, 1),
        relay_messages.ChunkRequest(4, 3, "config.json", 0, 100),
    )
    return relay_decoder(source, messages, relay_messages.decode_request)


def relay_reply_decoder(source: Source, folder: Path) -> Decoder:
    messages = (
        relay_messages.Latest(1, -1),
        relay_messages.Contents(2, 3, 1000, 2**64 - 1, (1, 2, 3), (("config.json", 10, 5), ("vocab.json", 0, 0))),
        relay_messages.WeightsChunk(4),
        relay_messages.Gone(5, 3),
    )
    return relay_decoder(source, messages, relay_messages.decode_reply)


DECODERS: dict[str, tuple[Callable[[Source, Path], Decoder], int]] = {
    "wire": (wire_decoder, 28),
    "record": (record_decoder, 15),
    "take_records": (kernel_decoder, 19),
    "arena": (arena_decoder, 5),
    "replay_arena": (replay_decoder, 2),
    "journal": (journal_decoder, 5),
    "ledger": (ledger_decoder, 3),
    "safetensors": (safetensors_decoder, 8),
    "weight_board": (board_decoder, 5),
    "relay_request": (relay_request_decoder, 5),
    "relay_reply": (relay_reply_decoder, 5),
    "receiver": (sequence_decoder, 10),
}
"""By name, with its share of the inputs."""
