"""``distill-run store``: list or delete the artifacts in a store. Imports neither Hydra nor torch."""

import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from distill_runner.common.errors import UserError, suggestion
from distill_runner.pipeline.holds import holders, remove_void_holds
from distill_runner.pipeline.inventory import (
    KINDS,
    Entry,
    dependent_entries,
    freed_bytes,
    list_entries,
    occupied_bytes,
    unused_entries,
)
from distill_runner.pipeline.store import Store, is_readable


def manage_store(options: Namespace) -> int:
    """List or delete artifacts. Return 1 if the user did not confirm, or something selected is still needed; else 0.

    Raises:
        UserError: there is no such store, or what to delete is not clear.
    """
    folder = Path(options.store)
    if not folder.is_dir():
        raise UserError("--store", folder, "there is no such folder", "Name the store of your runs (store.dir).")
    store = list_entries(folder)
    if options.action == "delete":
        return _delete(options, store)
    is_part = options.kind or options.key or _states(options)
    return _list(_select(options, store) if is_part else store, store)


def _list(selection: Sequence[Entry], store: Sequence[Entry]) -> int:
    _print_entries(selection, store)
    counts = Counter(entry.kind for entry in selection)
    for kind, number in counts.items():
        print(f"{kind:12} {number:5} {_bytes(occupied_bytes(entry for entry in selection if entry.kind == kind)):>10}")
    total = _bytes(occupied_bytes(selection))
    print(f"{'total':12} {len(selection):5} {total:>10}  files with several names are counted once")
    return 0


def _print_entries(selection: Sequence[Entry], store: Sequence[Entry]) -> None:
    kinds = {entry.key: entry.kind for entry in store}
    for entry in selection:
        print(_line(entry, kinds))


def _line(entry: Entry, kinds: Mapping[str, str]) -> str:
    """Return the printed line of an artifact; ``kinds`` maps all keys in the store to their kinds."""
    sources = ", ".join(f"{kinds[key]} {key}" for key in sorted(entry.references) if key in kinds)
    notes = [entry.name, sources and f"from {sources}", "" if entry.state == "complete" else entry.state]
    size, age = _bytes(occupied_bytes([entry])), _age(entry.age)
    return f"{entry.kind:12} {entry.key} {size:>10} {age:>6}  {'; '.join(filter(None, notes))}".rstrip()


def _delete(options: Namespace, store: Sequence[Entry]) -> int:
    selection = _select(options, store)
    remove_void_holds(Path(options.store))
    holder_of = {key: holder for holder in holders(Path(options.store)) for key in holder.keys}
    busy = [entry for entry in selection if entry.key in holder_of and is_readable(entry.path)]
    for entry in busy:
        print(f"{entry.kind} {entry.key} is held by {holder_of[entry.key]}: not deleted")
    # What a run in progress holds is not unused. For other selections, something that was asked for stays.
    code = int(bool(busy) and not _selects_only_unused(options))
    selection = [entry for entry in selection if entry not in busy]
    if not selection:
        print("nothing to delete")
        return code
    _print_entries(selection, store)
    if dependents := dependent_entries(store, selection):
        print(f"{len(dependents)} others were made from these and stay complete")
    print(f"{len(selection)} to delete, which frees {_bytes(freed_bytes(selection))}")
    if not options.yes and not _confirm():
        print("nothing deleted")
        return 1
    folder = Store(Path(options.store))
    for entry in selection:
        if reason := folder.delete(entry.path):
            print(f"{entry.kind} {entry.key} {reason}: not deleted")
            code = 1
    return code


def _selects_only_unused(options: Namespace) -> bool:
    return options.unused and not (options.kind or options.key or options.damaged or options.partial)


def _states(options: Namespace) -> list[str]:
    return [state for state in ("unused", "damaged", "partial") if getattr(options, state)]


def _select(options: Namespace, store: Sequence[Entry]) -> list[Entry]:
    """Return the artifacts that the options select: of these kinds or keys, and in one of these states.

    Raises:
        UserError: the options select nothing, or name a kind or key that the store does not have.
    """
    states = _states(options)
    if not (options.kind or options.key or states):
        raise UserError(
            "delete", None, "nothing is selected", "Use --kind, --key, --unused, --damaged or --partial; see --help."
        )
    kinds, keys = {*KINDS, *(entry.kind for entry in store)}, {entry.key for entry in store}
    for kind in options.kind:
        if kind not in kinds:
            raise UserError("--kind", kind, "there is no such kind", suggestion(kind, kinds))
    for prefix in options.key:
        if len(matches := [key for key in keys if key.startswith(prefix)]) != 1:
            problem = f"{len(matches)} keys start with this" if matches else "no key starts with this"
            raise UserError("--key", prefix, problem, suggestion(prefix, matches or keys))
    idle = {entry.path for entry in unused_entries(store, Path(options.runs))} if options.unused else set()
    is_named = {
        entry.path: not (options.kind or options.key)
        or entry.kind in options.kind
        or entry.key.startswith(tuple(options.key))
        for entry in store
    }
    return [
        entry for entry in store if is_named[entry.path] and (not states or entry.state in states or entry.path in idle)
    ]


def _confirm() -> bool:
    if not sys.stdin.isatty():
        raise UserError("delete", None, "needs a confirmation, and there is no terminal to ask on", "Add --yes.")
    return input("Delete them? [y/N] ").strip().lower() in ("y", "yes")


def _bytes(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0, seconds):.0f} s"
