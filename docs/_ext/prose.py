"""Words and long sentences of README and docs, here or at a commit: `python docs/_ext/prose.py [commit]`.

Code, tables and headings are not counted as sentences; an item of a list is one at least.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
LONG = 25
NOTEBOOK = ("docs/notebook.md", "docs/log.md", "docs/results/first-real-runs.md")
"""The notebook; the last two pages were its predecessors, and exist only at older commits."""


def sentences(text: str) -> list[int]:
    """The number of words of each sentence of a page in Markdown."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^(\||#|!\[|    ).*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"`[^`]*`", "code", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    found = []
    for block in re.split(r"\n\s*\n|^\s*(?:[-*]|\d+\.)\s", text, flags=re.MULTILINE):
        for sentence in re.split(r"(?<=[.!?:])[*\")\]]*\s+(?=[*\"(\[]*[A-Z`])", " ".join(block.split())):
            if words := re.findall(r"[^\W_][\w.,%'-]*", sentence):
                found.append(len(words))
    return found


def pages(commit: str | None) -> dict[str, str]:
    """Name -> text of every page."""
    if commit is None:
        kept = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
        return {str(page.relative_to(ROOT)): page.read_text() for page in kept if "_build" not in page.parts}
    listed = subprocess.run(
        ["git", "ls-tree", "-r", "--name-only", commit], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    names = [name for name in listed if re.fullmatch(r"README\.md|docs/.*\.md", name)]
    return {
        name: subprocess.run(
            ["git", "show", f"{commit}:{name}"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
        for name in names
    }


def main() -> None:
    commit = sys.argv[1] if len(sys.argv) > 1 else None
    groups: dict[str, list[int]] = {"README": [], "docs": [], "notebook": []}
    for name, text in pages(commit).items():
        group = "README" if name == "README.md" else "notebook" if name in NOTEBOOK else "docs"
        groups[group] += (counted := sentences(text))
        if commit is None and counted:
            share = sum(words > LONG for words in counted) / len(counted)
            print(f"  {name:44} {sum(counted):6} words, {100 * share:3.0f} % of {len(counted)} sentences long")
    print(commit or "here")
    for group, counted in groups.items():
        share = sum(words > LONG for words in counted) / max(1, len(counted))
        print(
            f"{group:10} {sum(counted):6} words in {len(counted):5} sentences, {100 * share:.1f} % above {LONG} words"
        )


if __name__ == "__main__":
    main()
