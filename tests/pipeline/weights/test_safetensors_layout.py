"""The header of a weights file: what it says is checked before anything is read."""

import contextlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from impala_llm.pipeline.weights.safetensors_layout import LayoutError, parse, plan
from tests.examples import examples


def header(table: object) -> bytes:
    text = json.dumps(table).encode()
    return len(text).to_bytes(8, "little") + text


def entry(shape: object, offsets: object, dtype: object = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    "bad",
    [
        b"",
        b"\x08\0\0\0",
        b"\xff" * 16,
        (2**62).to_bytes(8, "little") + b"{}",
        b"\x02\0\0\0\0\0\0\0{}more",
        header([]) + bytes(8),
        header("x") + bytes(8),
        header({"x": entry([2], [0, 8])}) + bytes(7),
        header({"x": entry([2], [0, 8])}) + bytes(9),
        header({"x": entry([3], [0, 8])}) + bytes(8),
        header({"x": entry([2], [0, 8], "F99")}) + bytes(8),
        header({"x": entry([2], [0, 8], ["F32"])}) + bytes(8),
        header({"x": entry([2.0], [0, 8])}) + bytes(8),
        header({"x": entry([True, 2], [0, 8])}) + bytes(8),
        header({"x": entry([-2], [0, -8])}) + bytes(8),
        header({"x": entry([-1, -2], [0, 8])}) + bytes(8),
        header({"x": entry([2], [8, 0])}) + bytes(8),
        header({"x": entry([2], [0])}) + bytes(8),
        header({"x": entry([2], None)}) + bytes(8),
        header({"x": entry([2] + [1] * 100, [0, 8])}) + bytes(8),
        header({"x": entry([2], [0, 8]), "y": entry([2], [0, 8])}) + bytes(8),
        header({"x": entry([1], [0, 4]), "y": entry([1], [8, 12])}) + bytes(12),
        header({"x": entry([1], [4, 8])}) + bytes(8),
    ],
)
def test_headers_that_lie_are_refused(bad: bytes) -> None:
    with pytest.raises(LayoutError):
        parse(memoryview(bad))


def test_headers_in_any_order_give_the_order_of_the_file() -> None:
    good = plan({"x": ("F32", (2,)), "a": ("BF16", (3,)), "none": ("F32", (0,))})
    data = good.header + bytes(14)
    assert parse(memoryview(data)) == good.infos
    table = {"b": entry([1], [4, 8]), "e": entry([0], [4, 4]), "a": entry([1], [0, 4])}
    assert list(parse(memoryview(header(table) + bytes(8)))) == ["a", "e", "b"]
    assert parse(memoryview(header({}))) == {}


@given(st.binary(max_size=200), st.integers(0, 40), st.binary(max_size=4))
@settings(max_examples=examples(80), deadline=None)
def test_any_bytes_give_a_layout_or_a_layout_error(noise: bytes, at: int, patch: bytes) -> None:
    good = plan({"x": ("F32", (2,)), "y": ("U8", (3,))}).header + bytes(11)
    for data in (noise, len(noise).to_bytes(8, "little") + noise, good[:at] + patch + good[at + len(patch) :]):
        with contextlib.suppress(LayoutError):
            for info in parse(memoryview(data)).values():
                assert 8 <= info.start <= info.end <= len(data)
