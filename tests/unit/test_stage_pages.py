"""What stages say of themselves: in MLflow as it is, on the page as text that runs nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from registry import stage_pages
from registry.stage_pages import as_html, page_of, texts_of


def test_a_stage_without_a_page_has_none(tmp_path: Path) -> None:
    assert page_of("distill", tmp_path) is None
    assert texts_of(tmp_path) == {}


def test_pages_and_documents_are_kept_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "report.md").write_text("# Layers\n", encoding="utf-8")
    (tmp_path / "report.json").write_text('{"layers": 3}', encoding="utf-8")
    (tmp_path / "model.safetensors").write_bytes(b"\x00")
    assert texts_of(tmp_path) == {"report.md": "# Layers\n", "report.json": '{"layers": 3}'}


def test_a_table_is_a_table(tmp_path: Path) -> None:
    (tmp_path / "report.md").write_text("| layer | error |\n|---|---|\n| q_proj | 0.01 |\n")
    page = page_of("quantize w4a16_gptq", tmp_path)
    assert page is not None
    assert page.stage == "quantize w4a16_gptq"
    assert "<td>q_proj</td>" in page.html


@pytest.mark.parametrize(
    "written",
    [
        "<script>alert(1)</script>",
        '<img src="http://host/x.png">',
        "![x](http://host/x.png)",
        "[press](javascript:alert(1))",
        "<http://host/x>",
        "[a]: http://host/x\n\n![a][a]",
    ],
)
def test_what_a_prompt_holds_runs_nothing_and_loads_nothing(written: str) -> None:
    html = as_html(f"{written}\n\n| prompt |\n|---|\n| {written.splitlines()[0]} |\n")
    for tag in ("<script", "<img", "<a "):
        assert tag not in html


def test_a_page_of_any_length_is_read_only_so_far(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_pages, "LARGEST", 10)
    (tmp_path / "report.json").write_text("x" * 11)
    (tmp_path / "report.md").write_text("x" * 10)
    assert texts_of(tmp_path) == {
        "report.md": "x" * 10,
        "report.json": "report.json has more than 10 bytes; it lies in the store.",
    }
