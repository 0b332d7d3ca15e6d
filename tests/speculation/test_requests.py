"""Promises: decoded prompts are chosen by a hash, evenly over the families, and a prefix of the choice is even too."""

from collections import Counter

import pytest

from draftmill.contracts.errors import InputError
from draftmill.speculation.requests import Request, choose

MANY = [Request(f"{family}{index}", family, (1,), (2, 3)) for family in "abc" for index in range(10)]


def test_the_choice_is_even_over_the_families_and_so_are_its_prefixes():
    chosen = choose(MANY, ["c"], 8, seed=0)
    assert Counter(request.family for request in chosen) == {"a": 4, "b": 4}
    assert Counter(request.family for request in chosen[:4]) == {"a": 2, "b": 2}


def test_the_choice_depends_on_ids_and_seed_and_never_on_position():
    assert choose(MANY[::-1], [], 6, seed=0) == choose(MANY, [], 6, seed=0)
    assert choose(MANY, [], 6, seed=1) != choose(MANY, [], 6, seed=0)
    assert choose(MANY, [], 6, seed=0) != choose(MANY, [], 30, seed=0)[::-1][:6]


def test_a_short_family_is_taken_whole_and_the_others_fill_up():
    some = [request for request in MANY if request.family != "a" or request.id == "a0"]
    assert Counter(request.family for request in choose(some, [], 7, seed=0)) == {"a": 1, "b": 3, "c": 3}


def test_no_headline_family_is_an_error():
    with pytest.raises(InputError, match="reported apart"):
        choose(MANY, ["a", "b", "c"], 3, seed=0)
