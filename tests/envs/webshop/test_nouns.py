import sys
from types import SimpleNamespace

import pytest

from impala_llm.envs.webshop import CatalogueError
from impala_llm.envs.webshop.nouns import CachedNouns, TaggedNouns, heuristic_nouns, installed_nouns


def test_cached_file_is_used_and_named(shop, read_cases):
    assert shop.noun_source == "file"
    nouns = read_cases("data/nouns.json")
    assert all(shop.nouns(asin) == nouns[asin] for asin in shop)


def test_without_file_or_model_the_heuristic(small_shop, item, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    shop = small_shop(item(name="Alder Hair Brush with 12 Soft Washable Pads"), nouns=None)
    assert shop.noun_source == "heuristic"
    assert shop.nouns("A1") == ["alder", "hair", "brush", "pads"]


def test_a_spacy_model_comes_first(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name in ("spacy", "en_core_web_lg") or None)

    def load(model: str):
        return lambda title: [
            SimpleNamespace(text=text, pos_=kind) for text, kind in ((title, "NOUN"), (model, "VERB"))
        ]

    monkeypatch.setitem(sys.modules, "spacy", SimpleNamespace(load=load))
    nouns = installed_nouns()
    assert nouns.name == "spacy:en_core_web_lg"
    assert nouns("A1", "Brush") == ["brush"]


def test_each_title_is_tagged_once():
    asked = []
    nouns = TaggedNouns("counting", lambda title: asked.append(title) or [title])
    nouns("A1", "Brush").append("spoiled")
    assert nouns("A2", "Brush") == ["Brush"]
    assert asked == ["Brush"]


def test_heuristic_is_close_to_the_recorded_tags(shop):
    pairs = [(set(shop.nouns(asin)), set(heuristic_nouns(shop[asin].title))) for asin in shop]
    common = sum(len(theirs & ours) for theirs, ours in pairs)
    assert 2 * common / sum(len(theirs) + len(ours) for theirs, ours in pairs) > 0.9


def test_repeated_nouns_stay():
    assert heuristic_nouns("Brush and Brush") == ["brush", "brush"]
    assert CachedNouns.of_products({"A1": ["brush", "brush"]}, ["A1"], "x")("A1", "") == ["brush", "brush"]


@pytest.mark.parametrize(("nouns", "problem"), [({}, "is missing"), ({"A1": "brush"}, "list of strings")])
def test_bad_noun_file_names_source_and_asin(nouns, problem):
    with pytest.raises(CatalogueError, match=rf"nouns\.json: asin 'A1': .*{problem}"):
        CachedNouns.of_products(nouns, ["A1"], "nouns.json")
