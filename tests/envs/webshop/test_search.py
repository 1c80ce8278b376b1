import itertools
import math
from collections import Counter

import pytest

from impala_llm.envs.webshop import analyze
from impala_llm.envs.webshop.search import SearchIndex, encoded_length


@pytest.fixture(scope="module")
def index(shop):
    return SearchIndex([product.search_text for product in shop.products], list(shop))


def test_golden_searches(read_cases, shop, index):
    for case in read_cases("cases/search.jsonl"):
        assert index.search(case["query"]) == shop.search(case["query"]) == case["asins"]


def test_encoded_length_keeps_four_bits():
    assert [encoded_length(n) for n in range(40)] == list(range(40))
    for n in range(40, 3000):
        rest = n - 24
        step = 1
        while rest // step >= 16:
            step *= 2
        assert encoded_length(n) == 24 + rest // step * step
    assert encoded_length(41) == 40 and encoded_length(55) == 54 and encoded_length(57) == 56


def _bm25(documents, query):
    """Scores from the definition, in double precision."""
    counts = [Counter(analyze(document)) for document in documents]
    lengths = [sum(count.values()) for count in counts]
    indexed = [length for length in lengths if length]
    average = sum(indexed) / len(indexed)
    scores = []
    for count, length in zip(counts, lengths, strict=True):
        score = 0.0
        for term, repeats in Counter(analyze(query)).items():
            frequency = sum(term in other for other in counts)
            idf = math.log(1 + (len(indexed) - frequency + 0.5) / (frequency + 0.5))
            norm = 0.9 * (1 - 0.4 + 0.4 * encoded_length(length) / average)
            score += repeats * idf * count[term] / (count[term] + norm) if count[term] else 0.0
        scores.append(score)
    return scores


def test_hits_are_in_the_order_of_the_definition(shop, index):
    documents = {product.asin: product.search_text for product in shop.products}
    for query in ("gold plated usb cable", "soft soft face cream", "café mocha 8 ounce", "the of"):
        expected = dict(zip(documents, _bm25(list(documents.values()), query), strict=True))
        hits = index.search(query, k=len(documents))
        assert set(hits) == {asin for asin, score in expected.items() if score > 0}
        for better, worse in itertools.pairwise(hits):
            assert expected[better] >= expected[worse] * (1 - 1e-6)


def test_documents_without_tokens_do_not_count():
    """In the mean length, of which the share of a long text's length in its score depends."""
    documents = ["red", "red red hat hat hat", "hat"]
    assert SearchIndex(documents, ["a", "b", "c"]).search("red") == ["b", "a"]
    assert SearchIndex(["", "...", *documents], ["d", "e", "a", "b", "c"]).search("red") == ["b", "a"]


def test_ties_in_order_of_names_and_limit():
    index = SearchIndex(["red hat"] * 6 + ["red red hat"], ["f", "B", "a", "C", "e", "d", "z"])
    assert index.search("red") == ["z", "B", "C", "a", "d", "e", "f"]
    assert index.search("red", k=3) == ["z", "B", "C"]
    assert index.search("red", k=7) == index.search("red", k=70)


def test_any_word_matches_and_repeats_count():
    index = SearchIndex(["red hat", "blue scarf", "green glove"], ["a", "b", "c"])
    assert set(index.search("red scarf")) == {"a", "b"}
    assert index.search("red scarf scarf")[0] == "b"


@pytest.mark.parametrize("query", ["", " ", "the of and", "zzzqqq", "!!!", "☆"])
def test_no_hits(query):
    assert SearchIndex(["red hat"], ["a"]).search(query) == []


def test_query_in_any_case_and_form():
    index = SearchIndex(["red hats", "blue scarf"], ["a", "b"])
    assert index.search("HAT") == index.search("hat's") == ["a"]


def test_empty_index():
    assert SearchIndex([], []).search("hat") == []
    assert SearchIndex([""], ["a"]).search("hat") == []


def test_hits_are_copies():
    index = SearchIndex(["red hat"], ["a"])
    index.search("red").append("spoiled")
    assert index.search("red") == ["a"]
