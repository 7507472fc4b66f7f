"""``distill-run-store``: list or delete the artifacts in a store. Imports neither Hydra nor torch."""

import os
import sys
from argparse import Namespace, RawDescriptionHelpFormatter
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from distill_runner.commands.arguments import Parser, ended
from distill_runner.common.errors import UserError, nearest
from distill_runner.pipeline.inventory import KINDS, Entry, entries, freed, occupied, unused, users
from distill_runner.pipeline.store import Store

EXAMPLES = """\
examples:
  distill-run-store                                   list the artifacts, their sizes, and what each was made from
  distill-run-store delete --kind checkpoints         delete the teachers' checkpoints
  distill-run-store delete --key 1a2b --key 3c4d      delete two artifacts, named by the first digits of their keys
  distill-run-store delete --unused                   delete what no finished run was made from
  distill-run-store delete --damaged --partial --yes  delete what is not complete, without asking
A run builds missing artifacts again. Files that a run's folder shares are freed when that folder is deleted.
"""


def main() -> None:
    """Entry point. Exit codes: 0, 1 (not confirmed, or an artifact is being built), 2 (user error)."""
    ended(lambda: sys.exit(_act(_parser().parse_args())))


def _act(arguments: Namespace) -> int:
    store = Path(arguments.store)
    if not store.is_dir():
        raise UserError("--store", store, "there is no such folder", "Name the store of your runs (store.dir).")
    known = entries(store)
    return _delete(arguments, known) if arguments.action == "delete" else _list(known)


def _parser() -> Parser:
    parser = Parser(
        "distill-run-store",
        description="List or delete the artifacts in a store.",
        epilog=EXAMPLES,
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("action", nargs="?", choices=["list", "delete"], default="list")
    store = os.environ.get("DISTILL_STORE_DIR", "outputs/store")
    parser.add_argument("--store", default=store, help="folder of the store (default: %(default)s)")
    parser.add_argument("--kind", action="append", default=[], help=f"all artifacts of this kind: {', '.join(KINDS)}")
    parser.add_argument("--key", action="append", default=[], help="one artifact, named by the first digits of its key")
    parser.add_argument("--unused", action="store_true", help="artifacts that no finished run in --runs was made from")
    parser.add_argument(
        "--damaged", action="store_true", help="artifacts whose files have changed since they were built"
    )
    parser.add_argument(
        "--partial", action="store_true", help="unfinished artifacts, from which an interrupted run may resume"
    )
    parser.add_argument(
        "--runs", default="outputs/runs", help="folder that contains the folders of runs (default: %(default)s)"
    )
    parser.add_argument("--yes", action="store_true", help="do not ask for confirmation")
    return parser


def _list(known: Sequence[Entry]) -> int:
    _show(known, known)
    counts = Counter(entry.kind for entry in known)
    for kind, number in counts.items():
        print(f"{kind:12} {number:5} {_bytes(occupied(entry for entry in known if entry.kind == kind)):>10}")
    print(f"{'total':12} {len(known):5} {_bytes(occupied(known)):>10}  files with several names are counted once")
    return 0


def _show(chosen: Sequence[Entry], known: Sequence[Entry]) -> None:
    kinds = {entry.key: entry.kind for entry in known}
    for entry in chosen:
        print(_line(entry, kinds))


def _line(entry: Entry, kinds: Mapping[str, str]) -> str:
    """Return the printed line of an artifact; ``kinds`` maps all keys in the store to their kinds."""
    made_from = ", ".join(f"{kinds[key]} {key}" for key in sorted(entry.refers) if key in kinds)
    notes = [entry.what, made_from and f"from {made_from}", "" if entry.state == "whole" else entry.state]
    size, age = _bytes(occupied([entry])), _age(entry.age)
    return f"{entry.kind:12} {entry.key} {size:>10} {age:>6}  {'; '.join(filter(None, notes))}".rstrip()


def _delete(arguments: Namespace, known: Sequence[Entry]) -> int:
    chosen = _chosen(arguments, known)
    if not chosen:
        print("nothing to delete")
        return 0
    _show(chosen, known)
    if others := users(known, chosen):
        print(f"{len(others)} others were made from these and stay complete")
    print(f"{len(chosen)} to delete, which frees {_bytes(freed(chosen))}")
    if not arguments.yes and not _confirmed():
        print("nothing deleted")
        return 1
    store = Store(Path(arguments.store))
    busy = [entry for entry in chosen if not store.delete(entry.path)]
    for entry in busy:
        print(f"{entry.kind} {entry.key} is being built and was not deleted")
    return 1 if busy else 0


def _chosen(arguments: Namespace, known: Sequence[Entry]) -> list[Entry]:
    states = [state for state in ("damaged", "partial") if getattr(arguments, state)]
    if not (arguments.kind or arguments.key or arguments.unused or states):
        raise UserError(
            "delete", None, "nothing is selected", "Take --kind, --key, --unused, --damaged or --partial; see --help."
        )
    kinds, keys = {*KINDS, *(entry.kind for entry in known)}, {entry.key for entry in known}
    for kind in arguments.kind:
        if kind not in kinds:
            raise UserError("--kind", kind, "there is no such kind", nearest(kind, kinds))
    for begin in arguments.key:
        if len(found := [key for key in keys if key.startswith(begin)]) != 1:
            problem = f"{len(found)} keys start with this" if found else "no key starts with this"
            raise UserError("--key", begin, problem, nearest(begin, found or keys))
    idle = {entry.path for entry in unused(known, Path(arguments.runs))} if arguments.unused else set()
    return [
        entry
        for entry in known
        if entry.kind in arguments.kind
        or entry.key.startswith(tuple(arguments.key))
        or entry.state in states
        or entry.path in idle
    ]


def _confirmed() -> bool:
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


if __name__ == "__main__":
    main()
