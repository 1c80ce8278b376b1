"""BM25 search over product texts, in the order of the original's engine (Lucene, k1 = 0.9, b = 0.4).

Invariant: the hits of a query depend only on the documents: score (float32) descending, ties by name ascending; a
document without any term of the query is never a hit.
"""

import functools
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from impala_llm.envs.webshop.analyzer import analyze, term, tokens

MAX_HITS = 50
K1, B = 0.9, 0.4
_CACHED_QUERIES = 4096


def encoded_length(num_tokens: int) -> int:
    """The length that the engine's one-byte code keeps of a document of `num_tokens` tokens.

    Exact below 40; above, what exceeds 24 is cut to its four leading bits.
    """
    rest = num_tokens - 24
    if rest < 16:
        return num_tokens
    shift = rest.bit_length() - 4
    return 24 + ((rest >> shift) << shift)


class SearchIndex:
    """An immutable inverted index in flat arrays: about 8 bytes for each different term of each document.

    documents: texts, read once. names: one for each, unique; what hits are called and what breaks ties.
    """

    def __init__(self, documents: Iterable[str], names: Sequence[str]) -> None:
        self._names = tuple(names)
        occurrences, lengths, self._term_ids = _read(documents)
        starts, self._documents, counts = _postings(occurrences, lengths, len(self._term_ids))
        self._starts = starts.tolist()
        num_indexed = max(1, int(np.count_nonzero(lengths)))
        frequencies = np.diff(starts)
        self._idf = np.log(1.0 + (num_indexed - frequencies + 0.5) / (frequencies + 0.5)).astype(np.float32)
        mean_length = max(1, len(occurrences)) / num_indexed
        encoded = np.array([encoded_length(length) for length in lengths.tolist()])
        norms = (K1 * (1.0 - B + B * encoded / mean_length)).astype(np.float32)
        # counts / (counts + norm), the part of the score that does not depend on the query
        self._saturations = counts / (counts + norms[self._documents])
        self._ranks = np.empty(len(self._names), np.int32)
        self._ranks[sorted(range(len(self._names)), key=self._names.__getitem__)] = np.arange(len(self._names))
        # Agents repeat their queries: within an episode, and all episodes of one goal.
        self._cached_hits = functools.lru_cache(_CACHED_QUERIES)(self._hits)

    def search(self, query: str, k: int = MAX_HITS) -> list[str]:
        """The names of the best `k` documents, best first."""
        return list(self._cached_hits(query, k))

    def _hits(self, query: str, k: int) -> tuple[str, ...]:
        documents, parts = [], []
        for word, repeats in Counter(analyze(query.lower())).items():
            if (term_id := self._term_ids.get(word)) is not None:
                postings = slice(self._starts[term_id], self._starts[term_id + 1])
                documents.append(self._documents[postings])
                parts.append(np.float32(repeats) * self._idf[term_id] * self._saturations[postings])
        if not parts:
            return ()
        # Terms are float32 and their sum is rounded to float32 once, as in the original's engine.
        scores = np.bincount(np.concatenate(documents), np.concatenate(parts))
        hits = np.flatnonzero(scores)
        hit_scores = scores[hits].astype(np.float32)
        if len(hits) > k:
            best = hit_scores >= np.partition(hit_scores, len(hits) - k)[len(hits) - k]
            hits, hit_scores = hits[best], hit_scores[best]
        order = np.lexsort((self._ranks[hits], -hit_scores))[:k]
        return tuple(self._names[hit] for hit in hits[order].tolist())


class _TermIds(dict[str, int]):
    """Token as written -> id of its term, -1 for a stop word; makes ids as tokens come."""

    def __init__(self) -> None:
        self.terms: dict[str, int] = {}

    def __missing__(self, token: str) -> int:
        word = term(token)
        self[token] = found = -1 if word is None else self.terms.setdefault(word, len(self.terms))
        return found


def _read(documents: Iterable[str]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], dict[str, int]]:
    """Term ids of all documents end to end, number of terms of each document, and term -> id."""
    ids = _TermIds()
    occurrences, lengths = array("i"), array("i")
    for document in documents:
        before = len(occurrences)
        occurrences.extend([found for token in tokens(document) if (found := ids[token]) >= 0])
        lengths.append(len(occurrences) - before)
    return np.array(occurrences, np.int32), np.array(lengths, np.int32), ids.terms


def _postings(
    occurrences: npt.NDArray[np.int32], lengths: npt.NDArray[np.int32], num_terms: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """Sorts occurrences by term: start of each term's postings, their documents, and how often the term is in each."""
    num_documents = max(1, len(lengths))
    keys = np.repeat(np.arange(len(lengths), dtype=np.int64), lengths)
    keys += occurrences.astype(np.int64) * num_documents
    keys.sort()
    firsts = np.flatnonzero(np.diff(keys, prepend=-1))
    counts = np.diff(firsts, append=len(keys)).astype(np.float32)
    keys = keys[firsts]
    starts = np.searchsorted(keys, np.arange(num_terms + 1, dtype=np.int64) * num_documents)
    return starts, (keys % num_documents).astype(np.int32), counts
