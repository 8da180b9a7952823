"""Every setting is documented once."""

from __future__ import annotations

import re

import pytest

from registry.settings import CHECKOUT, Settings, settings


def test_the_table_names_exactly_the_settings() -> None:
    text = (CHECKOUT / "docs" / "settings.md").read_text()
    documented = re.findall(r"^\| `PILOTAGE_(\w+)`", text, flags=re.MULTILINE)
    assert sorted(documented) == sorted(name.upper() for name in Settings.model_fields)


def test_a_key_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PILOTAGE_TEACHER_API_KEY", "sk-planted")
    settings.cache_clear()
    assert "sk-planted" not in repr(settings())
    assert "sk-planted" not in settings().model_dump_json()
