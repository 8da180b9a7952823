"""Hardware files: what an hour of the machine costs that a load profile is meant for."""

from __future__ import annotations

from eval_suites.costs import machines_paid, price_note
from eval_suites.load import LoadProfile
from recipes import loader
from recipes.loader import short_name
from recipes.schema import HardwareRecipe


def price_of(name: str | None, profile: LoadProfile, gpus: int = 0) -> tuple[float | None, str]:
    """Price per hour of all machines that a server of so many GPUs takes, and a sentence about it.

    Of the named hardware file, or of the shipped one that the profile is meant for. Raises
    `UserError`.
    """
    wanted = name
    if wanted is None and profile.hardware in loader.shipped("hardware"):
        wanted = profile.hardware
    if wanted is None:
        return None, f"no costs: no hardware file is called {profile.hardware}"
    recipe = loader.load(wanted, "hardware", HardwareRecipe)
    machines = machines_paid(recipe, gpus)
    price = None if recipe.price_per_hour is None else recipe.price_per_hour * machines
    return price, price_note(short_name(wanted), recipe, machines)


def known_price(profile: LoadProfile, gpus: int = 0) -> float | None:
    """The price of the hardware that the profile is meant for; None where none is known."""
    return price_of(None, profile, gpus)[0]
