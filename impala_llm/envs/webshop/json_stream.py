"""Reads a large JSON file one record at a time.

Invariant: at most one block of the file and one record are in memory, and every error names the file and the
record at which reading stopped.
"""

import codecs
import json
import re
from collections.abc import Iterator
from contextlib import closing
from typing import NoReturn

from impala_llm.envs.webshop.product import CatalogueError

BLOCK_BYTES = 1 << 20
"""Bytes of the file that are read at a time."""
_LONGEST_TOKEN = 16  # an escape, a literal or a number cut in two by the end of a block is shorter
_ASIN = re.compile(r'"asin"\s*:\s*"([^"]*)"')


def list_items(path: str) -> Iterator[object]:
    """The items of a file that holds one JSON list.

    Raises:
        CatalogueError: not JSON, truncated, or not a list; names the file, the item's position and, if it shows, its
        asin. OSError: the file cannot be read.
    """
    with closing(_Reader(path, "[")) as reader:
        position = 0
        while reader.another(f"record {position}"):
            yield reader.value(f"record {position}")
            position += 1
        reader.end()


def object_entries(path: str) -> Iterator[tuple[str, object]]:
    """The entries of a file that holds one JSON object.

    Raises:
        CatalogueError: not JSON, truncated, or not an object; names the file and the key of the entry.
        OSError: the file cannot be read.
    """
    with closing(_Reader(path, "{")) as reader:
        last = None
        while reader.another("the first entry" if last is None else f"the entry after {last!r}"):
            key = reader.key("the first key" if last is None else f"the key of the entry after {last!r}")
            yield key, reader.value(f"entry {key!r}")
            last = key
        reader.end()


class _Reader:
    """A cursor over the file; `text[at:]` is what was read and not yet used."""

    def __init__(self, path: str, opening: str) -> None:
        self.path = path
        self.file = open(path, "rb")  # noqa: SIM115 - `close` and `fail` close it
        self.decode = codecs.getincrementaldecoder("utf-8")().decode
        self.parse = json.JSONDecoder().raw_decode
        self.text, self.at, self.first, self.finished, self.undecodable = "", 0, True, False, False
        self.closing = {"[": "]", "{": "}"}[opening]
        kind = {"[": "list", "{": "object"}[opening]
        found = self.next_character("the first record")
        if found != opening:
            self.fail(f"must hold a JSON {kind}, but {f'begins with {found!r}' if found else 'is empty'}")
        self.at += 1

    def fail(self, problem: str) -> NoReturn:
        self.file.close()
        raise CatalogueError(f"{self.path}: {problem}")

    def fill(self, name: str) -> None:
        """Reads one more block; `name` is what is being read, for the error."""
        if self.undecodable:
            self.fail(f"has bytes that are not UTF-8 text in {self.with_asin(name, len(self.text))}")
        block = self.file.read(BLOCK_BYTES)
        try:
            new = self.decode(block, not block)
        except UnicodeDecodeError as error:
            # At the end of the file half a character is left, which is truncation and not another encoding.
            new, self.undecodable = error.object[: error.start].decode(), bool(block)
        self.text, self.at, self.finished = self.text[self.at :] + new, 0, not block

    def with_asin(self, name: str, end: int) -> str:
        found = _ASIN.search(self.text, self.at, end)
        return f"{name} (asin {found[1]!r})" if found else name

    def next_character(self, name: str) -> str:
        """The next character that is no white space, not yet used; "" at the end of the file."""
        while True:
            while self.at < len(self.text) and self.text[self.at] in " \t\r\n":
                self.at += 1
            if self.at < len(self.text) or self.finished:
                return self.text[self.at : self.at + 1]
            self.fill(name)

    def another(self, name: str) -> bool:
        """Whether another value follows; steps over the comma before it."""
        character = self.next_character(name)
        if character == self.closing:
            self.at += 1
            return False
        if not character:
            self.fail(f"the file is truncated: it ends before {name}")
        if not self.first:
            if character != ",":
                self.fail(f"expected ',' before {name}, found {character!r}")
            self.at += 1
        self.first = False
        return True

    def key(self, name: str) -> str:
        key = self.value(name)
        if not isinstance(key, str):
            self.fail(f"{name} must be a string, is {key!r:.40}")
        if (found := self.next_character(name)) != ":":
            self.fail(f"expected ':' after key {key!r}, found {found!r}")
        self.at += 1
        return key

    def value(self, name: str) -> object:
        self.next_character(name)
        while True:
            try:
                value, end = self.parse(self.text, self.at)
            except json.JSONDecodeError as error:
                unclosed = error.msg.startswith("Unterminated string")
                if not self.finished and (unclosed or error.pos >= len(self.text) - _LONGEST_TOKEN):
                    self.fill(name)
                elif unclosed or self.is_unfinished(error.pos):
                    self.fail(f"the file is truncated in {self.with_asin(name, len(self.text))}")
                else:
                    self.fail(f"{self.with_asin(name, error.pos)} is not valid JSON: {error.msg}")
            except RecursionError:
                self.fail(f"{name} is nested too deeply")
            else:
                if end < len(self.text) or self.finished:
                    self.at = end
                    return value
                self.fill(name)

    def is_unfinished(self, at: int) -> bool:
        """Whether the file ends at an offset, or in the middle of a word of JSON that begins there."""
        rest = self.text[at:].rstrip()
        return any(word.startswith(rest) for word in ("true", "false", "null", "-"))

    def end(self) -> None:
        if rest := self.next_character("the end"):
            self.fail(f"has something after its closing {self.closing!r}: {rest!r}")

    def close(self) -> None:
        self.file.close()
