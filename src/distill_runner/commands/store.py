"""``distill-run store``: list or delete the artifacts in a store."""

import sys
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from distill_runner.common.errors import UserError, require_choice, suggestion
from distill_runner.pipeline import store
from distill_runner.pipeline.store import Entry, Store, occupied_bytes


def manage_store(options: Namespace) -> int:
    """List or delete artifacts. Return 1 if the user did not confirm, or something selected is still needed; else 0.

    Raises:
        UserError: there is no such store, or what to delete is not clear.
    """
    folder = Path(options.store)
    if not folder.is_dir():
        raise UserError("--store", folder, "there is no such folder", "Name the store of your runs (store.dir).")
    entries = store.list_entries(folder)
    states = [name for name in ("unused", "damaged", "partial") if getattr(options, name)]
    selection = _selection(options, states, entries)
    kinds = {entry.key: entry.kind for entry in entries}
    for entry in selection:
        sources = ", ".join(f"{kinds[key]} {key}" for key in sorted(entry.references) if key in kinds)
        notes = [entry.name, sources and f"from {sources}", "" if entry.state == "complete" else entry.state]
        days = f"{(time.time() - entry.changed) / 86400:.1f} d"
        text = f"{entry.kind:12} {entry.key} {_size(occupied_bytes([entry]))} {days:>7}"
        print(f"{text}  {'; '.join(filter(None, notes))}".rstrip())
    if options.action == "delete":
        return _delete(options, states, selection, entries)
    for kind, number in Counter(entry.kind for entry in selection).items():
        print(f"{kind:12} {number:5} {_size(occupied_bytes(entry for entry in selection if entry.kind == kind))}")
    print(f"{'total':12} {len(selection):5} {_size(occupied_bytes(selection))}  files with several names count once")
    return 0


def _selection(options: Namespace, states: Sequence[str], entries: Sequence[Entry]) -> Sequence[Entry]:
    """Return the artifacts that the options select: of these kinds or keys, and in one of these states.

    Raises:
        UserError: there is nothing selected to delete, or no such kind or key in the store.
    """
    if options.action == "delete" and not (options.kind or options.key or states):
        remedy = "Use --kind, --key, --unused, --damaged or --partial; see --help."
        raise UserError("delete", None, "nothing is selected", remedy)
    kinds, keys = {*store.KINDS, *(entry.kind for entry in entries)}, {entry.key for entry in entries}
    for kind in options.kind:
        require_choice("--kind", kind, kinds, "there is no such kind")
    for prefix in options.key:
        if len(matches := [key for key in keys if key.startswith(prefix)]) != 1:
            problem = f"{len(matches)} keys start with this" if matches else "no key starts with this"
            raise UserError("--key", prefix, problem, suggestion(prefix, matches or keys))
    names, is_all = tuple(options.key), not (options.kind or options.key)
    selection = [one for one in entries if is_all or one.kind in options.kind or one.key.startswith(names)]
    unused = {*store.unused_entries(entries, Path(options.runs))} if options.unused else set[Entry]()
    return [entry for entry in selection if not states or entry.state in states or entry in unused]


def _delete(options: Namespace, states: Sequence[str], selection: Sequence[Entry], entries: Sequence[Entry]) -> int:
    if not selection:
        print("nothing to delete")
        return 0
    keys, paths = {entry.key for entry in selection}, {entry.path for entry in selection}
    if count := sum(entry.path not in paths and bool(entry.references & keys) for entry in entries):
        print(f"{count} others were made from these and stay complete")
    print(f"{len(selection)} to delete, which frees {_size(store.freed_bytes(selection)).strip()}")
    if not options.yes:
        if not sys.stdin.isatty():
            raise UserError("delete", None, "needs a confirmation, and there is no terminal to ask on", "Add --yes.")
        if input("Delete them? [y/N] ").strip().lower() not in ("y", "yes"):
            print("nothing deleted")
            return 1
    folder, code = Store(Path(options.store)), 0
    asks_for_unused = states == ["unused"] and not (options.kind or options.key)
    for entry in selection:
        if reason := folder.delete(entry.path):
            print(f"{entry.kind} {entry.key} {reason}: not deleted")
            # What a run in progress needs is not unused. In other selections, something that was asked for stays.
            code = code if asks_for_unused and reason == store.IN_USE else 1
    return code


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:10.1f} MiB"
