"""The words of the synthetic shop: its product types, attributes, option values and brands.

Tables only; `synthetic.py` makes products from them. Invariant, held by tests: inside one option group no
value is accepted in place of another by the strict option matcher of the reward, and no value falls into its
colour-substring trap. Thus a goal's options can always be met, and only by the values that the goal names.
"""

from typing import NamedTuple


class Shelf(NamedTuple):
    """One product type: `query` is what shoppers call it, `price` (dollars) the middle of its products' prices."""

    category: str
    product_category: str
    query: str
    price: float
    groups: tuple[str, ...]


def _listed(text: str) -> tuple[str, ...]:
    return tuple(text.split(", "))


OPTION_VALUES: dict[str, tuple[str, ...]] = {
    "color": _listed("red, blue, black, white, green, pink, purple, brown, gray, yellow, orange, gold, silver, teal"),
    "size": _listed("small, medium, large, xl, xxl"),
    "shoe size": _listed("5, 6, 7, 8, 9, 10"),
    "volume": _listed("2 oz, 4 oz, 8 oz, 12 oz, 16 oz, 32 oz"),
    "count": _listed("single, 2 pack, 3 pack, 6 pack, 12 pack, 24 pack"),
    "length": _listed("3 ft, 6 ft, 10 ft, 15 ft, 20 ft"),
    "capacity": _listed("16 gb, 32 gb, 64 gb, 128 gb, 256 gb"),
    "scent": _listed("lavender, rose, vanilla, citrus, coconut, jasmine, cedar, unscented"),
    "flavor": _listed("vanilla, chocolate, lemon, strawberry, caramel, honey, cinnamon, mango, cherry, apple"),
    "style": _listed("classic, modern, floral, vintage, plain, striped"),
    "material": _listed("cotton, wool, linen, silk, bamboo, leather"),
    "frame": _listed("oak, pine, metal, glass, ceramic, plastic"),
    "finish": _listed("matte, glossy, satin, shimmer"),
    "fit": _listed("slim, regular, loose, tall, petite"),
}

ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "beauty": _listed(
        "cruelty free, long lasting, paraben free, fragrance free, alcohol free, oil free, anti aging, travel "
        "size, natural ingredients, quick dry, sensitive skin, non toxic, deep cleansing, water proof, "
        "clinically tested, plant based"
    ),
    "electronics": _listed(
        "fast charging, noise cancelling, water resistant, long lasting, easy install, high resolution, gold "
        "plated, ultra thin, heavy duty, high speed, touch screen, energy saving, shock proof, carrying case, "
        "hands free, light weight"
    ),
    "fashion": _listed(
        "machine wash, moisture wicking, quick drying, stretch fabric, soft lining, wrinkle free, tumble dry, "
        "daily wear, fade resistant, breathable mesh, double stitched, light weight, eco friendly, non slip, "
        "hand made, winter warm"
    ),
    "garden": _listed(
        "easy assemble, space saving, heavy duty, easy clean, non slip, water resistant, eco friendly, rust "
        "proof, fade resistant, hand made, energy efficient, dust proof, long lasting, pet safe, stain "
        "resistant, double sided"
    ),
    "grocery": _listed(
        "gluten free, sugar free, dairy free, non gmo, certified organic, plant based, low sodium, high "
        "protein, high fiber, keto friendly, kosher certified, individually wrapped, low carb, soy free, fair "
        "trade, family size"
    ),
}

BRANDS = _listed(
    "alder, bravo, cavella, dunmere, eastwick, fernley, glenora, hartwell, ivoro, juniper, kestrel, lumora, "
    "marlow, norwood, orsini, pemberton, quill, ravena, solvay, tilden, umbra, verano, winslow, zephyr"
)

TAILS = _listed("gift set, new design, value deal, home edition, pro series, starter kit")

# Words that make a further query out of a product type when a catalogue is larger than its shelves.
QUALIFIERS = _listed(
    "kids, mini, deluxe, basic, compact, outdoor, indoor, summer, holiday, office, school, sport, beach, "
    "camping, luxury, everyday, baby, teen, senior, party, wedding, hotel, studio, garage, city, country, "
    "ocean, mountain, forest, desert, morning, evening, weekend, festival, artist, chef, doctor, pilot, "
    "student, traveler"
)

# Title words that a part-of-speech tagger would not call a noun or a proper noun.
ADJECTIVES = frozenset(
    _listed(
        "free, long, lasting, anti, natural, quick, dry, sensitive, non, toxic, deep, water, proof, "
        "clinically, tested, based, fast, charging, cancelling, resistant, easy, high, plated, ultra, thin, "
        "heavy, saving, hands, light, wicking, drying, soft, wrinkle, tumble, daily, breathable, double, "
        "stitched, friendly, made, warm, assemble, clean, efficient, safe, sided, certified, organic, low, "
        "individually, wrapped, fair, new, hot, smart, green, deluxe, basic, compact, outdoor, indoor, mini, "
        "everyday"
    )
)

_SCENTED, _DRINK = ("scent", "volume", "count"), ("flavor", "volume", "count")
_SNACK, _CLOTHES, _SHOES = ("flavor", "count"), ("color", "size", "fit"), ("color", "shoe size", "style")

_TABLE: dict[tuple[str, str], dict[tuple[str, str], tuple[float, tuple[str, ...]]]] = {
    ("beauty", "Beauty & Personal Care"): {
        ("Skin Care › Creams", "face cream"): (24, _SCENTED),
        ("Skin Care › Lotions", "body lotion"): (14, _SCENTED),
        ("Skin Care › Masks", "face mask"): (16, ("scent", "count")),
        ("Skin Care › Soaps", "hand soap"): (9, _SCENTED),
        ("Skin Care › Sun Care", "sunscreen"): (18, ("volume", "count")),
        ("Skin Care › Scrubs", "body scrub"): (17, ("scent", "volume")),
        ("Skin Care › Lip Care", "lip balm"): (8, ("flavor", "count")),
        ("Skin Care › Serums", "face serum"): (32, ("volume",)),
        ("Skin Care › Bath", "bath bomb"): (13, ("scent", "color", "count")),
        ("Hair Care › Shampoos", "shampoo"): (15, _SCENTED),
        ("Hair Care › Conditioners", "conditioner"): (16, _SCENTED),
        ("Hair Care › Brushes", "hair brush"): (12, ("color", "style")),
        ("Hair Care › Accessories", "hair clip"): (9, ("color", "style", "count")),
        ("Hair Care › Styling", "hair gel"): (11, ("scent", "volume")),
        ("Makeup › Lips", "lipstick"): (13, ("color", "finish")),
        ("Makeup › Eyes", "mascara"): (14, ("color", "finish")),
        ("Makeup › Eyes", "eye liner"): (10, ("color", "finish", "count")),
        ("Makeup › Nails", "nail polish"): (9, ("color", "finish")),
        ("Makeup › Bags", "makeup bag"): (19, ("color", "style", "size")),
        ("Oral Care › Toothbrushes", "toothbrush"): (8, ("color", "count")),
        ("Oral Care › Toothpaste", "toothpaste"): (7, ("flavor", "count")),
        ("Oral Care › Rinses", "mouth wash"): (9, ("flavor", "volume")),
        ("Fragrance › Sprays", "perfume"): (48, ("scent", "volume")),
        ("Shaving › Razors", "razor"): (20, ("color", "count")),
        ("Shaving › Creams", "shaving cream"): (11, ("scent", "volume")),
    },
    ("electronics", "Electronics"): {
        ("Audio › Headphones", "headphones"): (60, ("color", "style")),
        ("Audio › Headphones", "ear buds"): (45, ("color", "count")),
        ("Audio › Speakers", "speaker"): (70, ("color", "style")),
        ("Audio › Speakers", "sound bar"): (130, ("color",)),
        ("Phones › Cases", "phone case"): (15, ("color", "finish", "style")),
        ("Phones › Chargers", "phone charger"): (18, ("color", "length", "count")),
        ("Phones › Cables", "usb cable"): (10, ("color", "length", "count")),
        ("Phones › Chargers", "power bank"): (34, ("color", "count")),
        ("Phones › Stands", "phone holder"): (14, ("color", "style")),
        ("Tablets › Cases", "tablet case"): (24, ("color", "style", "finish")),
        ("Computers › Keyboards", "keyboard"): (55, ("color", "style")),
        ("Computers › Mice", "computer mouse"): (25, ("color", "finish")),
        ("Computers › Mice", "mouse pad"): (12, ("color", "size", "style")),
        ("Computers › Bags", "laptop bag"): (42, ("color", "size", "style")),
        ("Computers › Stands", "laptop stand"): (36, ("color", "frame")),
        ("Computers › Cameras", "webcam"): (50, ("color",)),
        ("Computers › Monitors", "monitor"): (180, ("color", "finish")),
        ("Computers › Storage", "memory card"): (22, ("capacity", "count")),
        ("Computers › Storage", "hard drive"): (85, ("capacity", "color")),
        ("Camera & Photo › Cameras", "camera"): (240, ("color", "capacity")),
        ("Camera & Photo › Tripods", "tripod"): (38, ("color", "size")),
        ("Camera & Photo › Straps", "camera strap"): (16, ("color", "material", "style")),
        ("Wearables › Watches", "smart watch"): (110, ("color", "size")),
        ("Wearables › Bands", "watch band"): (17, ("color", "size", "material")),
        ("Video › Projectors", "projector"): (150, ("color",)),
    },
    ("fashion", "Clothing, Shoes & Jewelry"): {
        ("Tops › Shirts", "tee shirt"): (18, _CLOTHES),
        ("Tops › Hoodies", "hoodie"): (38, _CLOTHES),
        ("Tops › Sweaters", "sweater"): (42, ("color", "size", "material")),
        ("Outerwear › Jackets", "jacket"): (75, _CLOTHES),
        ("Outerwear › Coats", "rain coat"): (55, ("color", "size")),
        ("Bottoms › Jeans", "jeans"): (48, _CLOTHES),
        ("Bottoms › Shorts", "shorts"): (24, _CLOTHES),
        ("Bottoms › Leggings", "leggings"): (22, ("color", "size")),
        ("Bottoms › Skirts", "skirt"): (30, ("color", "size", "style")),
        ("Dresses › Casual", "dress"): (46, ("color", "size", "style")),
        ("Sleepwear › Sets", "pajamas"): (34, ("color", "size", "material")),
        ("Swimwear › One Piece", "swimsuit"): (36, ("color", "size", "style")),
        ("Socks › Crew", "socks"): (13, ("color", "material", "count")),
        ("Shoes › Boots", "boots"): (90, _SHOES),
        ("Shoes › Sneakers", "sneakers"): (65, _SHOES),
        ("Shoes › Sandals", "sandals"): (35, _SHOES),
        ("Shoes › Slippers", "slippers"): (22, _SHOES),
        ("Shoes › Loafers", "loafers"): (58, _SHOES),
        ("Accessories › Scarves", "scarf"): (19, ("color", "material", "style")),
        ("Accessories › Gloves", "gloves"): (17, ("color", "size", "material")),
        ("Accessories › Belts", "belt"): (23, ("color", "size")),
        ("Accessories › Hats", "hat"): (21, ("color", "style")),
        ("Bags › Wallets", "wallet"): (28, ("color", "style")),
        ("Bags › Backpacks", "backpack"): (49, ("color", "size", "style")),
        ("Bags › Handbags", "handbag"): (62, ("color", "style")),
    },
    ("garden", "Home & Kitchen"): {
        ("Bedding › Pillows", "throw pillow"): (20, ("color", "size", "material")),
        ("Bedding › Blankets", "blanket"): (36, ("color", "size", "material")),
        ("Bedding › Sheets", "bed sheet"): (40, ("color", "material")),
        ("Decor › Curtains", "curtain"): (32, ("color", "length", "style")),
        ("Decor › Rugs", "area rug"): (95, ("color", "size", "style")),
        ("Bath › Mats", "bath mat"): (19, ("color", "size")),
        ("Bath › Towels", "towel"): (16, ("color", "material", "count")),
        ("Lighting › Lamps", "table lamp"): (44, ("color", "style", "frame")),
        ("Decor › Clocks", "wall clock"): (29, ("color", "style")),
        ("Decor › Frames", "picture frame"): (18, ("color", "size", "frame")),
        ("Decor › Mirrors", "mirror"): (68, ("size", "style", "frame")),
        ("Furniture › Shelves", "book shelf"): (120, ("color", "frame")),
        ("Furniture › Tables", "coffee table"): (160, ("color", "frame", "style")),
        ("Furniture › Tables", "night stand"): (90, ("color", "frame")),
        ("Furniture › Chairs", "office chair"): (145, ("color", "style")),
        ("Furniture › Chairs", "bar stool"): (80, ("color", "frame", "count")),
        ("Furniture › Covers", "sofa cover"): (35, ("color", "size", "material")),
        ("Kitchen › Linens", "table cloth"): (21, ("color", "size", "style")),
        ("Decor › Candles", "candle"): (17, ("scent", "color", "count")),
        ("Decor › Vases", "vase"): (27, ("color", "size", "style")),
        ("Outdoor › Planters", "plant pot"): (22, ("color", "size", "frame")),
        ("Outdoor › Watering", "garden hose"): (39, ("color", "length")),
        ("Outdoor › Decor", "wind chime"): (25, ("color", "frame")),
        ("Storage › Bins", "storage bin"): (23, ("color", "size", "count")),
        ("Storage › Laundry", "laundry basket"): (26, ("color", "size")),
    },
    ("grocery", "Grocery & Gourmet Food"): {
        ("Beverages › Tea", "green tea"): (13, _SNACK),
        ("Beverages › Coffee", "coffee beans"): (19, _DRINK),
        ("Beverages › Cocoa", "hot cocoa"): (12, _SNACK),
        ("Beverages › Energy", "energy drink"): (24, _DRINK),
        ("Snacks › Bars", "granola bar"): (11, _SNACK),
        ("Snacks › Mixes", "trail mix"): (15, _DRINK),
        ("Snacks › Chips", "potato chips"): (9, ("volume", "count")),
        ("Snacks › Popcorn", "popcorn"): (10, _SNACK),
        ("Snacks › Crackers", "crackers"): (8, ("volume", "count")),
        ("Snacks › Cookies", "cookies"): (12, _SNACK),
        ("Snacks › Fruit", "fruit snacks"): (13, _SNACK),
        ("Snacks › Meat", "beef jerky"): (21, _DRINK),
        ("Snacks › Candy", "gummy candy"): (9, _DRINK),
        ("Spreads › Nut Butters", "nut butter"): (14, _DRINK),
        ("Spreads › Jams", "fruit jam"): (10, ("flavor", "volume")),
        ("Spreads › Syrups", "maple syrup"): (18, ("volume", "count")),
        ("Pantry › Sauces", "pasta sauce"): (9, ("volume", "count")),
        ("Pantry › Grains", "rice"): (16, ("volume", "count")),
        ("Pantry › Oils", "olive oil"): (22, ("volume", "count")),
        ("Pantry › Sauces", "hot sauce"): (8, _DRINK),
        ("Pantry › Spices", "spice mix"): (7, ("volume", "count")),
        ("Pantry › Baking", "pancake mix"): (11, _DRINK),
        ("Breakfast › Oats", "oatmeal"): (10, _SNACK),
        ("Breakfast › Cereals", "cereal"): (9, _DRINK),
        ("Health › Powders", "protein powder"): (39, _DRINK),
    },
}


def _interleaved_shelves() -> tuple[Shelf, ...]:
    columns = [
        [
            Shelf(category, f"{department} › {path}", query, float(price), groups)
            for (path, query), (price, groups) in rows.items()
        ]
        for (category, department), rows in _TABLE.items()
    ]
    return tuple(shelf for row in zip(*columns, strict=True) for shelf in row)


# One shelf of each category in turn, so that a small catalogue has all five.
SHELVES: tuple[Shelf, ...] = _interleaved_shelves()

SYNONYMS: dict[str, str] = {
    "face cream": "daily moisturizer", "body lotion": "skin softener", "face mask": "facial sheet",
    "hand soap": "palm cleanser", "sunscreen": "spf protection", "body scrub": "bathing exfoliant",
    "lip balm": "mouth moisturizer", "face serum": "facial elixir", "bath bomb": "fizzing tub ball",
    "shampoo": "scalp wash", "conditioner": "tress softener", "hair brush": "detangling tool",
    "hair clip": "barrette", "hair gel": "styling jelly", "lipstick": "lip paint", "mascara": "lash darkener",
    "eye liner": "kohl pencil", "nail polish": "fingertip lacquer", "makeup bag": "cosmetics pouch",
    "toothbrush": "dental cleaner", "toothpaste": "dentifrice", "mouth wash": "oral rinse",
    "perfume": "eau de parfum", "razor": "shaver", "shaving cream": "beard foam", "headphones": "over ear headset",
    "ear buds": "wireless pods", "speaker": "music box", "sound bar": "television audio",
    "phone case": "mobile cover", "phone charger": "mobile power adapter", "usb cable": "data cord",
    "power bank": "portable battery", "phone holder": "mobile mount", "tablet case": "ipad sleeve",
    "keyboard": "typing board", "computer mouse": "pc pointer", "mouse pad": "desk gliding surface",
    "laptop bag": "notebook sleeve", "laptop stand": "notebook riser", "webcam": "video call lens",
    "monitor": "desktop display", "memory card": "sd storage", "hard drive": "external disk",
    "camera": "photo shooter", "tripod": "three leg mount", "camera strap": "photographer sling",
    "smart watch": "fitness tracker", "watch band": "wrist bracelet", "projector": "home cinema beamer",
    "tee shirt": "crew neck top", "hoodie": "hooded sweatshirt", "sweater": "knitted pullover",
    "jacket": "outer wear", "rain coat": "weather slicker", "jeans": "denims", "shorts": "bermudas",
    "leggings": "yoga tights", "skirt": "kilt", "dress": "gown", "pajamas": "sleepwear",
    "swimsuit": "bathing costume", "socks": "hosiery", "boots": "ankle footwear", "sneakers": "running shoes",
    "sandals": "flip flops", "slippers": "house shoes", "loafers": "moccasins", "scarf": "neck warmer",
    "gloves": "mittens", "belt": "waist strap", "hat": "cap", "wallet": "billfold", "backpack": "rucksack",
    "handbag": "ladies purse", "throw pillow": "couch cushion", "blanket": "cozy cover",
    "bed sheet": "mattress linen", "curtain": "window drape", "area rug": "floor carpet",
    "bath mat": "shower floor pad", "towel": "drying cloth", "table lamp": "desk light",
    "wall clock": "hanging timepiece", "picture frame": "photo holder", "mirror": "looking glass",
    "book shelf": "library rack", "coffee table": "living room stand", "night stand": "bedside cabinet",
    "office chair": "desk seat", "bar stool": "counter seat", "sofa cover": "couch slip",
    "table cloth": "dining linen", "candle": "wax light", "vase": "flower jar", "plant pot": "herb tub",
    "garden hose": "lawn watering pipe", "wind chime": "porch bell", "storage bin": "closet organizer",
    "laundry basket": "hamper", "green tea": "sencha leaves", "coffee beans": "espresso roast",
    "hot cocoa": "warm chocolate powder", "energy drink": "caffeine beverage", "granola bar": "muesli stick",
    "trail mix": "hiking nuts", "potato chips": "salted crisps", "popcorn": "popped corn",
    "crackers": "savory biscuits", "cookies": "sweet biscuits", "fruit snacks": "berry chews",
    "beef jerky": "dried meat", "gummy candy": "jelly sweets", "nut butter": "almond spread",
    "fruit jam": "berry preserve", "maple syrup": "tree sap topping", "pasta sauce": "spaghetti topping",
    "rice": "basmati grain", "olive oil": "cooking fat", "hot sauce": "chili dressing",
    "spice mix": "seasoning blend", "pancake mix": "flapjack batter", "oatmeal": "porridge",
    "cereal": "breakfast flakes", "protein powder": "whey supplement",
}  # fmt: skip
"""Query -> other words for it, none of which the search takes for a word of the query."""
