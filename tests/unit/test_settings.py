"""Every setting is documented once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from registry.errors import UserError
from registry.settings import CHECKOUT, Settings, settings


def test_the_table_names_exactly_the_settings() -> None:
    text = (CHECKOUT / "docs" / "settings.md").read_text()
    documented = re.findall(r"^\| `PILOTAGE_(\w+)`", text, flags=re.MULTILINE)
    assert sorted(documented) == sorted(name.upper() for name in Settings.model_fields)


def test_no_variable_of_ours_is_named_nowhere() -> None:
    text = (CHECKOUT / "docs" / "settings.md").read_text()
    folders = ("flows", "tasks", "registry", "recipes", "eval_suites", "benchmarks", "tests")
    files = [one for name in folders for one in (CHECKOUT / name).rglob("*")]
    files += [CHECKOUT / "Makefile", CHECKOUT / "prefect.yaml"]
    used = {
        name
        for file in files
        if file.suffix in (".py", ".j2", ".yaml", "") and file.is_file()
        for name in re.findall(r"\bPILOTAGE_[A-Z_]*[A-Z]\b", file.read_text())
    }
    assert {name for name in used if f"`{name}`" not in text} == set()


def test_a_key_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PILOTAGE_TEACHER_API_KEY", "sk-planted")
    settings.cache_clear()
    assert "sk-planted" not in repr(settings())
    assert "sk-planted" not in settings().model_dump_json()


@pytest.mark.parametrize("what", ["CANDIDATE", "RELEASE", "SMOKE"])
@pytest.mark.parametrize("name", ["candidate", "a/b/c", "/one", "candidate/"])
def test_a_name_that_no_deployment_has_is_a_persons_mistake(
    what: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"PILOTAGE_{what}_DEPLOYMENT", name)
    settings.cache_clear()
    with pytest.raises(UserError, match=f"PILOTAGE_{what}_DEPLOYMENT"):
        settings()
    monkeypatch.setenv(f"PILOTAGE_{what}_DEPLOYMENT", "candidate/one")
    settings.cache_clear()
    assert getattr(settings(), f"{what.lower()}_deployment") == "candidate/one"


@pytest.mark.parametrize("seconds", ["inf", "1e400", "1e12", "nan"])
def test_times_that_no_timer_takes_are_refused(
    seconds: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PILOTAGE_STOP_GRACE", seconds)
    settings.cache_clear()
    with pytest.raises(UserError, match="PILOTAGE_STOP_GRACE: Input should be"):
        settings()


@pytest.mark.parametrize(
    ("written", "meant"),
    [("MLFLOW_URL", "MLFLOW_URI"), ("STORE_URI", "STORE_URL"), ("SERVE_PYHTON", "SERVE_PYTHON")],
)
def test_a_setting_that_is_misspelt_is_not_ignored(
    written: str, meant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"PILOTAGE_{written}", "x")
    settings.cache_clear()
    with pytest.raises(UserError, match=f"PILOTAGE_{written}: is no setting.*\n.*{meant}\\?"):
        settings()


def test_names_that_are_no_settings_are_far_from_them(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (CHECKOUT / "docs" / "settings.md").read_text()
    for name in set(re.findall(r"`(PILOTAGE_[A-Z_]+)`", text)) - {"PILOTAGE_MLFLOW_URL"}:
        monkeypatch.setenv(name, "1")
    for name in Settings.model_fields:
        monkeypatch.delenv(f"PILOTAGE_{name.upper()}", raising=False)
    settings.cache_clear()
    assert settings().threads == 0


@pytest.mark.parametrize(
    "uri", ["ftp://h/x", "mlflow", "file:///tmp/x", "http://", "postgresql:/x"]
)
def test_what_mlflow_cannot_use_is_a_persons_mistake(
    uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PILOTAGE_MLFLOW_URI", uri)
    settings.cache_clear()
    with pytest.raises(UserError, match="PILOTAGE_MLFLOW_URI: String should match"):
        settings()
    for good in ("http://h:5000", "postgresql+psycopg://u:p@h/d", "sqlite:////tmp/x.db"):
        monkeypatch.setenv("PILOTAGE_MLFLOW_URI", good)
        settings.cache_clear()
        assert settings().mlflow_uri == good


@pytest.mark.parametrize("name", ["a?b", "a%20b", "a#b", "a\nb", "a\u202eb", "a\udcffb"])
def test_a_home_that_no_database_address_can_name_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PILOTAGE_HOME", str(tmp_path / name))
    settings.cache_clear()
    with pytest.raises(UserError, match=r"PILOTAGE_HOME=.*which the address of a database cannot"):
        settings()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["a b", "中文", "a'b;c@d:e"])
def test_other_homes_are_taken(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PILOTAGE_HOME", str(tmp_path / name))
    settings.cache_clear()
    assert settings().home == (tmp_path / name).resolve()
