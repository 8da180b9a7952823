"""The traffic that a release is for: a profile that it names, or none."""

from __future__ import annotations

from pathlib import Path

from recipes.schema import ReleaseRecipe
from registry.errors import Problem, UserError
from registry.savings import Asked
from tasks.capacity_inputs import read_traffic
from tasks.progress import LOG


def traffic_of(release: ReleaseRecipe) -> Asked:
    """The peak of the traffic that a release names. Raises `UserError` where it has none."""
    if release.traffic is None:
        return Asked()
    profile = read_traffic(Path(release.traffic).expanduser())
    if profile.peak_rate is None:
        raise UserError.at(
            f"{release.traffic}: peak_rate",
            "is null: the log has no arrivals to count",
            "profile a log with times of arrival",
        )
    window = profile.concurrency.window_s
    return Asked(profile.peak_rate, f"{Path(release.traffic).name}, over {window:g} s")


def traffic_or_none(release: ReleaseRecipe) -> Asked | None:
    """`traffic_of`; None where the file has changed for the worse since the release began."""
    try:
        return traffic_of(release)
    except UserError as error:
        LOG.warning("no replicas in deploy/: %s", error)
        return None


def traffic_problems(release: ReleaseRecipe) -> list[Problem]:
    """What is wrong with the traffic that a release names, found before a night of it."""
    try:
        traffic_of(release)
    except UserError as error:
        return error.problems
    return []
