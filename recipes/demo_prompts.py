"""Writes the demo's prompts: narrow families whose answers a small drafter can learn, and one open-ended family.

    python recipes/demo_prompts.py > recipes/demo_prompts.jsonl

Each family draws from a generator of its own, keyed by seed and name: adding a family, or rows to one, changes no
other row. All texts are ours. Families that SmolLM2 answers in one form were kept (LABBOOK.md says which were not).
"""

import json
import random
import sys
from collections.abc import Callable, Iterator

SEED = 7
ROWS_PER_FAMILY = 105
OPEN_ROWS = 55

NOUNS = (
    "anchor apple balloon barrel basket bicycle blanket boat bottle bridge bucket button camera candle carpet castle "
    "chair clock compass cottage curtain desk drum engine feather fence forest fountain garden guitar hammer harbor "
    "helmet island jacket kettle kitchen ladder lamp lantern lemon letter magnet market mirror monkey mountain needle "
    "notebook orange orchard oven paddle parcel pencil piano pillow pocket quilt rabbit ribbon river rocket saddle "
    "sailor scarf shovel silver spoon station statue suitcase summer table teapot temple ticket tiger tower tractor "
    "train tunnel umbrella valley vase village violin wagon wallet wheel whistle window winter yacht yellow zebra "
    "board cloud copper dragon eagle flower hotel insect jungle knight lizard museum"
).split()
PEOPLE = (
    "Alice Anna Ben Bruno Carla Clara Daniel David Elena Emma Felix Frank Grace Helen Henry Iris Ivan Jack Julia Karen "
    "Kevin Laura Leo Maria Martin Nina Nora Oscar Paula Peter Robert Rosa Sara Simon Thomas Tina Victor Walter"
).split()
PLACES = (
    "Athens Berlin Boston Cairo Chicago Denver Dublin Lisbon London Madrid Oslo Paris Prague Rome Seattle Sydney Tokyo "
    "Toronto Vienna Warsaw"
).split()
COLORS = "red blue green yellow black white orange purple brown gray".split()
VERBS = "add subtract multiply divide".split()


def numbers(draw: random.Random) -> str:
    first = draw.randint(1, 180)
    return f"Write the numbers from {first} to {first + draw.randint(25, 75)}, separated by commas."


def years(draw: random.Random) -> str:
    first = draw.randint(1900, 2000)
    return f"Write a HTML select box with options for the years {first} to {first + draw.randint(10, 30)}."


def arithmetic(draw: random.Random) -> str:
    name = f"{draw.choice(VERBS)}_by_{draw.randint(2, 99)}"
    return f"Write a Python function named {name} that takes a number and returns the result."


def compare(draw: random.Random) -> str:
    noun = draw.choice(NOUNS)
    return f'Write a Python function named is_{noun} that checks whether a string is equal to "{noun}".'


def record(draw: random.Random) -> str:
    name, age, city = draw.choice(PEOPLE), draw.randint(18, 79), draw.choice(PLACES)
    return f'Write a JSON object for a person with the name "{name}", the age {age} and the city "{city}".'


def product(draw: random.Random) -> str:
    name, price, color = draw.choice(NOUNS), draw.randint(2, 99), draw.choice(COLORS)
    return f'Write a JSON object for a product with the name "{name}", the price {price} and the color "{color}".'


def open_ended(draw: random.Random) -> str:
    noun, other, person, place = draw.choice(NOUNS), draw.choice(NOUNS), draw.choice(PEOPLE), draw.choice(PLACES)
    return draw.choice(
        (
            f"Tell a short story about {person} and a {noun}.",
            f"Why would someone put a {noun} next to a {other}?",
            f"Give {person} three tips for a day in {place}.",
            f"Write a short poem about a {noun} in {place}.",
            f"Explain to a child what a {noun} is.",
            f"What could {person} and a {noun} have in common?",
        )
    )


FAMILIES: dict[str, Callable[[random.Random], str]] = {
    "numbers": numbers,
    "years": years,
    "arithmetic": arithmetic,
    "compare": compare,
    "record": record,
    "product": product,
    "open": open_ended,
}


def rows() -> Iterator[dict[str, str]]:
    """Every row, family after family; no prompt twice."""
    for family, make in FAMILIES.items():
        draw = random.Random(f"{SEED}/{family}")
        seen: set[str] = set()
        while len(seen) < (OPEN_ROWS if family == "open" else ROWS_PER_FAMILY):
            text = make(draw)
            if text not in seen:
                yield {"id": f"{family}-{len(seen):04d}", "family": family, "prompt": text}
                seen.add(text)


if __name__ == "__main__":
    for row in rows():
        sys.stdout.write(json.dumps(row) + "\n")
