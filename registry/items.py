"""Items: what every single item of a measurement scored, one row per item.

Read from our own `items.parquet`, or from the `items.csv` or `items.jsonl` that others write. A
cell that is no finite number is never dropped, filled or converted: whoever asks for its column
gets the reason, with file, line, item and value. Every mistake that makes a whole file unusable
is named at once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from registry.evidence import ITEM_COLUMNS, ITEMS, Unusable
from registry.item_files import Table, defect, doubled_text, few, read_table, refuse_file, shown

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

ITEMS_CSV = "items.csv"
ITEMS_JSONL = "items.jsonl"
ITEM_FILES = (ITEMS, ITEMS_CSV, ITEMS_JSONL)

NO_METRICS = frozenset(ITEM_COLUMNS) - {"output_tokens"} | {"doc_hash"}
"""Columns that say what an item is. `output_tokens` is a measurement: gates of length read it."""

MAX_CELLS_SHOWN = 3

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_NUMBER_CHARACTERS = frozenset("0123456789+-.eE \t")


@dataclass(frozen=True, eq=False)
class Items:
    """One row per item, in order of item id (compared as text, by code point).

    `frame` has the column `item_id` and is labelled by the line (or row) of the file at which
    each item stands. `text_cells`: its cells are CSV texts, of which numbers are still to be made.
    """

    where: str
    frame: pd.DataFrame
    place: Literal["line", "row"] = "line"
    text_cells: bool = False
    _kept: dict[tuple[str, str], Any] = field(default_factory=dict, repr=False)
    """What was read of a column: several gates ask for the same one."""

    def __len__(self) -> int:
        return len(self.frame)

    @property
    def ids(self) -> np.ndarray:
        """Item ids, an array of `str`."""
        return self.frame["item_id"].to_numpy(dtype=object)

    def has(self, column: str) -> bool:
        return column in self.frame.columns

    def metrics(self) -> list[str]:
        """Columns that could be metrics: those that hold a number somewhere."""
        return [
            name
            for name in self.frame.columns
            if name not in NO_METRICS
            and any(not math.isnan(_number(cell, self.text_cells)) for cell in self.frame[name])
        ]

    def metric(self, name: str, largest: float = math.inf) -> np.ndarray:
        """One finite float64 per item, in order of item id.

        `name` is a column, or the part before the comma of exactly one (`exact_match` of
        `exact_match,strict-match`). Raises `Unusable` when there is no such column, or when a
        single cell is no finite number, or is beyond `largest` or its inverse.
        """
        import numpy as np

        column = self.column_of(name)
        if ("metric", column) not in self._kept:
            self._kept["metric", column] = _numbers(self.frame[column], self.text_cells)
        values: np.ndarray = self._kept["metric", column]
        bad = np.flatnonzero(~np.isfinite(values))
        if len(bad):
            self._refuse(f"metric {column!r}", "no finite number", column, bad.tolist())
        size = np.abs(values)
        bad = np.flatnonzero((size > largest) | ((size > 0) & (size < 1 / largest)))
        if len(bad):
            what = f"neither 0 nor a number from {1 / largest:g} to {largest:g}"
            self._refuse(f"metric {column!r}", what, column, bad.tolist())
        return values

    def labels(self, column: str) -> np.ndarray:
        """The text of a column for every item, an array of `str`. Raises `Unusable`.

        A column that does not exist and an empty cell are both refused: an item without its
        segment would be in no slice.
        """
        import numpy as np

        if not self.has(column):
            names = few(self.frame.columns)
            raise Unusable(f"{self.where}: no column {column!r}; it has: {names}")
        if ("labels", column) not in self._kept:
            texts = self.texts(column)
            bad = [index for index, text in enumerate(texts) if text is None]
            if bad:
                self._refuse(f"column {column!r}", "no label", column, bad)
            self._kept["labels", column] = np.array(texts, dtype=object)
        found: np.ndarray = self._kept["labels", column]
        return found

    def texts(self, column: str) -> list[str | None]:
        """The label of every item in a column that is there, None where it has none."""
        if ("texts", column) not in self._kept:
            self._kept["texts", column] = [_label(cell) for cell in self.frame[column].tolist()]
        found: list[str | None] = self._kept["texts", column]
        return found

    def column_of(self, name: str) -> str:
        """The column that `metric` reads for this name. Raises `Unusable`."""
        if name in NO_METRICS:
            raise Unusable(f"{self.where}: {name!r} is no metric; metrics: {self._listed()}")
        if self.has(name):
            return name
        found = [column for column in self.frame.columns if column.partition(",")[0] == name]
        if len(found) == 1:
            return str(found[0])
        if found:
            raise Unusable(
                f"{self.where}: metric {name!r} is there from several filters: name one of "
                f"{few(found)}"
            )
        raise Unusable(f"{self.where}: no metric {name!r}; it has: {self._listed()}")

    def _listed(self) -> str:
        return few(self.metrics()) or "none"

    def _refuse(self, what: str, lack: str, column: str, bad: Sequence[int]) -> None:
        """Raise with the count of bad cells and the first of them in the order of the file."""
        first = sorted(bad, key=self.frame.index.__getitem__)[:MAX_CELLS_SHOWN]
        named = [
            f"item {shown(self.frame['item_id'].iloc[index])} ({self.place} "
            f"{self.frame.index[index]}) {defect(self.frame[column].iloc[index])}"
            for index in first
        ]
        more = [f"and {len(bad) - len(first)} more"] if len(bad) > len(first) else []
        raise Unusable(
            f"{self.where}: {what} has {lack} for {len(bad)} of {len(self)} items: "
            + "; ".join(named + more)
        )


# -- reading ---------------------------------------------------------------------------------


def read_items(path: Path, expected: Mapping[str, str] | None = None) -> Items:
    """The items of a file, or of the one file of items in a folder. Raises `Unusable`.

    `expected` holds what the columns `bundle`, `engine`, `harness` must say in every row, where
    the file has them: rows that lie beside another measurement's summary are found out.
    """
    if path.is_dir():
        names = [name for name in ITEM_FILES if (path / name).exists()]
        if len(names) != 1:
            what = f"holds {' and '.join(names)}: keep one" if names else "holds no file of items"
            raise Unusable(f"{path} {what}")
        path = path / names[0]
    items = make_items(read_table(path))
    for column, value in (expected or {}).items():
        _check_recorded(items, column, value)
    return items


def make_items(table: Table) -> Items:
    """Items of a table with a column `item_id`. Raises `Unusable`: its problems and the ids'.

    An id is a text, or an integer that is taken as its text: JSON keys and CSV cells could not
    tell 7 from "7".
    """
    import pandas as pd

    place = table.place
    ids: list[str] = []
    nameless: list[str] = []
    at: dict[str, list[int]] = {}
    for line, cell in zip(table.lines, table.columns["item_id"], strict=True):
        if isinstance(cell, int) and not isinstance(cell, bool):
            cell = str(cell)
        elif not isinstance(cell, str) or not cell.strip():
            nameless.append(f"{place} {line}: item_id {defect(cell)}")
            continue
        ids.append(cell)
        # White space around an id makes no other item of it.
        at.setdefault(cell.strip(), []).append(line)
    doubled = {identity: found for identity, found in at.items() if len(found) > 1}
    if table.problems or nameless or doubled:
        # The doubled ids first: they are one problem of many rows.
        summary = [doubled_text(doubled, place)] if doubled else []
        refuse_file(table.where, [*summary, *table.problems, *nameless])
    if not ids:
        raise Unusable(f"{table.where}: holds no items")
    columns = {name: _array(cells) for name, cells in table.columns.items()}
    columns["item_id"] = _array(ids)
    frame = pd.DataFrame(columns, index=list(table.lines))
    order = sorted(range(len(ids)), key=ids.__getitem__)
    return Items(table.where, frame.take(order), place, table.text_cells)


def _array(cells: Any) -> Any:
    """Lists as they are, one Python object per cell: pandas would make 1.0 of 1 and NaN of None."""
    import pandas as pd

    return pd.Series(cells, dtype=object).array if isinstance(cells, list) else cells


def _check_recorded(items: Items, column: str, value: str) -> None:
    if not items.has(column) or items.frame[column].isna().all():
        return
    others = items.frame.loc[items.frame[column] != value, column]
    if len(others):
        raise Unusable(
            f"{items.where}: {column} of {len(others)} of {len(items)} rows is not the summary's "
            f"{shown(value)} but, e.g., {shown(others.iloc[0])}: the two are of different "
            "measurements; measure again"
        )


# -- cells -----------------------------------------------------------------------------------


def _numbers(cells: pd.Series, text_cells: bool) -> np.ndarray:
    """float64 per cell, NaN where it is no number."""
    import numpy as np

    if cells.dtype.kind in "iuf":
        return cells.to_numpy(dtype=np.float64)
    values = cells.tolist()
    if text_cells and set("".join(values)) <= _NUMBER_CHARACTERS:
        try:
            return np.array([float(value) for value in values], dtype=np.float64)
        except ValueError:
            pass
    return np.array([_number(value, text_cells) for value in values], dtype=np.float64)


def _number(cell: Any, text_cells: bool) -> float:
    """The cell's number; NaN for everything else, booleans and texts outside CSV included."""
    if text_cells and isinstance(cell, str) and _NUMBER.fullmatch(cell.strip()):
        return float(cell)
    if isinstance(cell, bool) or not isinstance(cell, int | float):
        return math.nan
    try:
        return float(cell)
    except OverflowError:
        return math.inf


def _label(cell: Any) -> str | None:
    if isinstance(cell, str):
        return cell if cell.strip() else None
    if isinstance(cell, bool):
        return str(cell).lower()
    if isinstance(cell, int) or (isinstance(cell, float) and math.isfinite(cell)):
        return str(cell)
    # NaT, the missing date, is a date to isinstance and unequal to itself.
    return str(cell) if isinstance(cell, date) and cell == cell else None
