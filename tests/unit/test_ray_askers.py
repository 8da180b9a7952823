"""What of the Ray workers needs no Ray."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from registry.errors import UserError
from tasks.engines.ray_askers import ask_sharded, shares_of


def test_shares_add_up_and_none_is_empty() -> None:
    assert shares_of(8, 2) == [4, 4]
    assert shares_of(7, 3) == [3, 2, 2]
    assert shares_of(3, 3) == [1, 1, 1]


def test_without_the_package_the_remedy_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match="`ray` is not installed") as caught:
        ask_sharded(
            [], [], print, may_ask=lambda: True, workers=2, address=None, scratch=tmp_path,
            concurrency=2, max_retry_wait=1.0, request_timeout=1.0,
        )  # fmt: skip
    assert "take `ray` out of the recipe" in str(caught.value)
