"""Hardware files: what an hour of the machine costs that a load profile is meant for."""

from __future__ import annotations

from eval_suites.costs import price_note
from eval_suites.load import LoadProfile
from recipes import loader
from recipes.loader import short_name
from recipes.schema import HardwareRecipe


def price_of(name: str | None, profile: LoadProfile) -> tuple[float | None, str]:
    """Price per hour, and a sentence about it.

    Of the named hardware file, or of the shipped one that the profile is meant for. Raises
    `UserError`.
    """
    wanted = name
    if wanted is None and profile.hardware in loader.shipped("hardware"):
        wanted = profile.hardware
    if wanted is None:
        return None, f"no costs: no hardware file is called {profile.hardware}"
    recipe = loader.load(wanted, "hardware", HardwareRecipe)
    return recipe.price_per_hour, price_note(short_name(wanted), recipe)


def known_price(profile: LoadProfile) -> float | None:
    """The price of the hardware that the profile is meant for; None where none is known."""
    return price_of(None, profile)[0]
