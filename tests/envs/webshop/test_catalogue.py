import json
import random

import pytest

from impala_llm.envs.webshop import CatalogueError, load_catalogue, records_to_catalogue


def test_golden_prices(shop, read_cases):
    assert shop.prices == read_cases("cases/prices_seed0.json")


def test_products_of_the_golden_files(shop):
    assert len(shop) == 300
    product = shop["S000000003"]
    assert product.title == "Ivoro Cruelty Free Hair Brushe Set"
    assert product.price_tag == "$354.66 to $567.46"
    assert "S000000003" in shop and "nan" not in shop
    assert list(shop)[:2] == ["S000000000", "S000000001"]
    assert [found.asin for found in shop.products] == list(shop)
    with pytest.raises(KeyError):
        shop["nan"]


def test_edge_products(edge_shop):
    assert len(edge_shop) == 17  # without "nan", a long asin and a repeated one
    assert edge_shop["B000000001"].title.startswith("Soft Hair Brush")
    assert edge_shop["B000000004"].options == {"size": ("s",)}
    assert edge_shop["B00000000G"].options == {"color": (), "size": ("m",)}
    assert edge_shop["B00000000H"].options == {"flavor name": ("vanilla | choc", "vanilla", "vanilla")}
    assert edge_shop["B00000000F"].query == "tea tree"


@pytest.mark.parametrize(
    ("pricing", "price_range", "tag"),
    [
        (None, (100.0,), "$100.0"),
        ("", (100.0,), "$100.0"),
        ("12.99", (100.0,), "$100.0"),  # no dollar sign: as if missing
        ("$12.99", (12.99,), "$12.99"),
        ("$1,299.00 - $1,499.50", (1299.0, 1499.5), "$1299.0 to $1499.5"),
        ("$5.99$6.99$7.99", (5.99, 6.99), "$5.99 to $6.99"),
        ("from $3 each", (3.0,), "$3.0"),
    ],
)
def test_pricing(small_shop, item, pricing, price_range, tag):
    product = small_shop(item(pricing=pricing))["A1"]
    assert (product.price_range, product.price_tag) == (price_range, tag)


def test_prices_are_drawn_in_product_order(small_shop, item):
    shop = small_shop(item("A1", pricing="$1$9"), item("A2", pricing="$5"), item("A3", pricing="$2$4"), seed=7)
    rng = random.Random(7)
    assert shop.prices == {"A1": rng.uniform(1, 9), "A2": 5.0, "A3": rng.uniform(2, 4)}


def test_option_names_and_values(small_shop, item):
    product = small_shop(item(options={"Color": [" Navy/Blue ", "RED", "red"], "SIZE": None, "Fit": []}))["A1"]
    assert product.options == {"color": ("navy | blue", "red", "red"), "fit": ()}
    assert small_shop(item(customization_options=None))["A1"].options == {}
    later = small_shop(item(options={"Color": ["a"], "Size": ["b"], "COLOR": ["c"]}))["A1"].options
    assert list(later.items()) == [("color", ("c",)), ("size", ("b",))]


@pytest.mark.parametrize(
    ("entry", "attributes"),
    [({}, ("DUMMY_ATTR",)), ({"attributes": []}, ()), ({"attributes": ["a", "b"]}, ("a", "b"))],
)
def test_attributes(item, entry, attributes):
    assert records_to_catalogue([item()], {"A1": entry})["A1"].attributes == attributes
    assert records_to_catalogue([item()], {})["A1"].attributes == ("DUMMY_ATTR",)


def test_bullets_query_and_text(small_shop, item):
    product = small_shop(item(name=" Brush  ", small_description="one text", query=" Hair BRUSH "))["A1"]
    assert (product.title, product.bullets, product.query) == (" Brush  ", ("one text",), "hair brush")
    assert product.search_text == " brush   a brush. one text "
    assert small_shop(item(small_description=[]))["A1"].search_text == "alder hair brush a brush.  "


def test_unused_keys_may_be_absent(small_shop, item):
    record = item()
    for key in ("full_description", "small_description", "pricing", "images", "customization_options"):
        del record[key]
    product = small_shop(record)["A1"]
    assert (product.description, product.bullets, product.options) == ("", ("",), {})


def test_num_products_is_a_slice_before_duplicates_go(small_shop, item):
    items = [item("A1"), item("A1", name="again"), item("A2"), item("nan"), item("A" * 11), item("A3")]
    assert list(small_shop(*items, num_products=4)) == ["A1", "A2"]
    assert list(small_shop(*items)) == ["A1", "A2", "A3"]
    assert small_shop(*items)["A1"].title == "Alder Hair Brush"
    with pytest.raises(ValueError, match="num_products is 0"):
        small_shop(*items, num_products=0)


def test_search(shop):
    hits = shop.search("usb cable", k=5)
    assert len(hits) == 5 and all("cable" in shop[asin].search_text for asin in hits)


# Corrupt files


@pytest.fixture
def files(tmp_path, item):
    """Writes the three files, the item file as given (text, bytes or records), and returns a loader."""

    def load(items=None, attributes=None, human=None, **options):
        contents = {
            "items.json": [item("A1"), item("A2")] if items is None else items,
            "attributes.json": {} if attributes is None else attributes,
            "human.json": {} if human is None else human,
        }
        for name, content in contents.items():
            data = content if isinstance(content, str | bytes) else json.dumps(content)
            (tmp_path / name).write_bytes(data if isinstance(data, bytes) else data.encode())
        return load_catalogue(*(tmp_path / name for name in contents), **options)

    return load


def test_good_files(files):
    assert list(files()) == ["A1", "A2"]


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda text: "", "must hold a JSON list, but is empty"),
        (lambda text: "{}", "must hold a JSON list, but begins with '{'"),
        (lambda text: "[]", "no usable product"),
        (lambda text: text[:-1], "truncated: it ends before record 2"),
        (lambda text: text[: text.index("A2") + 40], r"truncated in record 1 \(asin 'A2'\)"),
        (lambda text: text[: text.index('"A2') - 3], "truncated in record 1"),
        (lambda text: text.replace('"name"', "name", 1), r"record 0 \(asin 'A1'\) is not valid JSON"),
        (lambda text: text.replace('"asin"', "asin", 1), "record 0 is not valid JSON"),
        (lambda text: text.replace("}, {", "} {"), "expected ',' before record 1"),
        (lambda text: text + "x", "something after its closing"),
        (lambda text: text.replace('"A2"', '"A2\n"'), "record 1 is not valid JSON: Invalid control character"),
        (lambda text: "[" * 100_000, "record 0 is nested too deeply"),
    ],
)
def test_damaged_item_file_names_file_and_record(files, item, damage, problem):
    text = json.dumps([item("A1"), item("A2")])
    with pytest.raises(CatalogueError, match=rf"items\.json: .*{problem}"):
        files(damage(text))


def test_bytes_that_are_no_text(files, item):
    data = json.dumps([item("A1"), item("A2")]).encode().replace(b"A2", b"A2\xff")
    with pytest.raises(CatalogueError, match=r"items\.json: .*not UTF-8 text in record 1"):
        files(data)


def test_file_cut_within_a_character(files):
    with pytest.raises(CatalogueError, match=r"items\.json: .*truncated in record 0 \(asin 'A1'\)"):
        files(b'[{"asin": "A1", "name": "\xe2\x80')


def test_utf8_split_between_blocks(files, item, monkeypatch):
    text = json.dumps([item("A1", name="Brush ★ café"), item("A2")], ensure_ascii=False)
    for block in (1, 2, 3, 7):
        monkeypatch.setattr("impala_llm.envs.webshop.json_stream.BLOCK_BYTES", block)
        assert [product.title for product in files(text).products] == ["Brush ★ café", "Alder Hair Brush"]


def test_a_slice_does_not_read_further(files, item):
    text = json.dumps([item("A1"), item("A2")])[:-20]
    assert list(files(text, num_products=1)) == ["A1"]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"name": None}, "'name' must be a string, is null"),
        ({"query": 3}, "'query' must be a string, is 3"),
        ({"pricing": 12.5}, "'pricing' must be a string"),
        ({"pricing": "$1.2.3"}, r"'pricing' '\$1.2.3' has a part after '\$' that is no number"),
        ({"small_description": [1]}, "'small_description' must be a list of strings"),
        ({"small_description": {}}, "'small_description' must be a string, is an object"),
        ({"customization_options": "red"}, "'customization_options' must be an object of lists"),
        ({"customization_options": {"Color": "red"}}, "'customization_options' 'Color' must be a list"),
        ({"customization_options": {"Color": [{"image": 1}]}}, "'Color' has an item without a string 'value'"),
        ({"customization_options": {"Color": ["red"]}}, "'Color' has an item without a string 'value'"),
    ],
)
def test_bad_record_names_file_record_and_key(files, item, change, problem):
    with pytest.raises(CatalogueError, match=rf"items\.json: record 1 \(asin 'A2'\): .*{problem}"):
        files([item("A1"), item("A2", **change)])


@pytest.mark.parametrize("key", ["name", "category", "query", "product_category"])
def test_missing_key(files, item, key):
    record = item("A2")
    del record[key]
    with pytest.raises(CatalogueError, match=rf"record 1 \(asin 'A2'\): key '{key}' is missing"):
        files([item("A1"), record])


def test_record_without_asin_or_of_another_kind(files, item):
    record = item()
    del record["asin"]
    with pytest.raises(CatalogueError, match=r"items\.json: record 1: key 'asin' is missing"):
        files([item("A1"), record])
    with pytest.raises(CatalogueError, match=r"items\.json: record 0: must be a JSON object, is a list"):
        files([[]])


@pytest.mark.parametrize(
    ("attributes", "problem"),
    [
        ("[]", "must hold a JSON object, but begins with '\\['"),
        ('{"A1": {"attributes": ["soft"]}, "A2": {"attr', "truncated in entry 'A2'"),
        ('{"A1": {}, "A', "truncated in the key of the entry after 'A1'"),
        ('{"A1": {}', "truncated: it ends before the entry after 'A1'"),
        ('{"A1" {}}', "expected ':' after key 'A1'"),
        ('{"A1": {}, 5: {}}', "the key of the entry after 'A1' must be a string"),
        ('{"A1": {"attributes": [}}', "entry 'A1' is not valid JSON"),
        ({"A1": []}, "asin 'A1': must be a JSON object, is a list"),
        ({"A2": {"attributes": "soft"}}, "asin 'A2': 'attributes' must be a list of strings, is a string"),
        ({"A2": {"instruction": 1, "instruction_attributes": ["x"]}}, "asin 'A2': 'instruction' must be a string"),
        ({"A2": {"instruction": "x", "instruction_attributes": []}}, "asin 'A2': has an 'instruction' but no 'instr"),
        ({"A2": {"instruction_attributes": [1]}}, "asin 'A2': 'instruction_attributes' must be a list of strings"),
    ],
)
def test_bad_attribute_file(files, attributes, problem):
    with pytest.raises(CatalogueError, match=rf"attributes\.json: .*{problem}"):
        files(attributes=attributes)


@pytest.mark.parametrize(
    ("human", "problem"),
    [
        ({"A1": {}}, "asin 'A1': must be a list of instructions"),
        ({"A1": [5]}, "asin 'A1', instruction 0: must be a JSON object"),
        ({"A1": [{"instruction": "x"}, {}]}, "asin 'A1', instruction 1: key 'instruction' is missing"),
        (
            {"A1": [{"instruction": "x", "instruction_options": "x"}]},
            "instruction 0: 'instruction_options' must be a list",
        ),
        ('{"A1": [', "truncated in entry 'A1'"),
    ],
)
def test_bad_human_file(files, human, problem):
    with pytest.raises(CatalogueError, match=rf"human\.json: .*{problem}"):
        files(human=human)


def test_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        load_catalogue(tmp_path / "none.json", tmp_path / "none.json")
