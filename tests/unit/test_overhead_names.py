"""`make overhead` puts its clocks around names of our own modules and Prefect's."""

from __future__ import annotations

import importlib
from functools import reduce

import pytest

from benchmarks.overhead import CALLS


@pytest.mark.parametrize("place", [place for places in CALLS.values() for place in places])
def test_what_is_clocked_is_there(place: str) -> None:
    module, _, name = place.partition(":")
    assert callable(reduce(getattr, name.split("."), importlib.import_module(module)))
