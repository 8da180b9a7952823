"""The command `prune`: what of the store may go, and with --yes its removal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from flows.console import Json, show

if TYPE_CHECKING:
    from tasks.pruning import Pruned
    from tasks.shared_pruning import SharedPruned


def prune(
    days: Annotated[
        int, typer.Option(min=1, max=36_500, help="Runs and bundles younger than this stay.")
    ] = 30,
    yes: Annotated[bool, typer.Option("--yes", help="Remove; without it, only say what.")] = False,
    shared: Annotated[
        bool, typer.Option("--shared", help="In the store that machines share (and only there).")
    ] = False,
    as_json: Json = False,
) -> None:
    """Remove from the store what no alias, ledger line or recent run refers to."""
    from tasks.progress import configure_logging
    from tasks.pruning import prune as remove

    configure_logging()
    if shared:
        from tasks.shared_pruning import prune_shared

        pruned = prune_shared(days, yes=yes)
        show(pruned.document if as_json else shared_text(pruned), as_json)
        return
    done = remove(days, yes=yes)
    show(done.document if as_json else prune_text(done), as_json)


def prune_text(done: Pruned) -> str:
    """A table by stage, why the rest stays, and what is not touched."""
    from tasks.pruning import UNTOUCHED, reasons_of

    verb = "removed" if done.done else "would go"
    lines = [f"{'stage':<16}{'kept':>6}{'':>11}{verb:>12}"]
    for stage, counts in done.stages.items():
        kept, gone = size_text(counts["kept_bytes"]), size_text(counts["removed_bytes"])
        lines.append(f"{stage:<16}{counts['kept']:>6}{kept:>11}{counts['removed']:>12}{gone:>11}")
    if done.removed:
        lines += ["", f"{'Removed' if done.done else 'Would go'}:"]
        lines += [
            f"  {entry.stage}/{entry.key[:12]}  {size_text(entry.size):>9}  "
            f"made {entry.made_at:%Y-%m-%d}  {entry.label}".rstrip()
            for entry in done.removed
        ]
    if done.plan.keep:
        lines += ["", "The rest stays; an entry may have several reasons, and keeps its lineage:"]
        lines += [f"  {count:>5}  {reason}" for reason, count in reasons_of(done.plan.keep).items()]
    lines += [f"  stays: {reason}" for reason in done.stayed.values()]
    for path in done.unreadable:
        lines.append(f"  stays: {path} (no manifest that can be read; look at it yourself)")
    for path, size in done.leftovers:
        lines.append(f"{verb.capitalize()}: leftover {path.name} {size_text(size)}")
    total = sum(entry.size for entry in done.removed) + sum(size for _, size in done.leftovers)
    count = len(done.removed)
    lines += ["", f"Not touched: {', '.join(UNTOUCHED)}."]
    if done.done:
        lines.append(f"{count} entries removed, {size_text(total)}.")
    else:
        lines.append(
            f"Nothing was removed. `pilotage prune --days {done.days} --yes` removes {count} "
            f"entries, {size_text(total)}."
        )
    return "\n".join(lines)


def shared_text(done: SharedPruned) -> str:
    """Why entries stay, which ones go, and what belongs to none."""
    from tasks.pruning import reasons_of

    lines = [f"{len(done.entries)} entries at {done.url}; these stay, each with its lineage:"]
    lines += [f"  {count:>5}  {reason}" for reason, count in reasons_of(done.plan.keep).items()]
    lines += [f"  stays: {stage}/{key[:12]} (used meanwhile)" for stage, key in done.stayed]
    lines += ["", f"{'Removed' if done.done else 'Would go'}:"]
    lines += [
        f"  {entry.stage}/{entry.key[:12]}  {size_text(entry.size):>9}  "
        f"last used {entry.used_at:%Y-%m-%d}  {entry.label}".rstrip()
        for entry in done.removed
    ]
    count = sum(len(names) for names in done.leftovers.values())
    lines.append(f"  {count} files of no entry, {size_text(done.leftover_bytes)}")
    if not done.done:
        lines.append(
            f"Nothing was removed. `pilotage prune --shared --days {done.days} --yes` removes it."
        )
    return "\n".join(lines)


def size_text(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
