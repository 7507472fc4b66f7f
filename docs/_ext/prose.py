"""The Markdown of this project: one sentence a line, and no banned words.

``python docs/_ext/prose.py`` prints what is wrong, and each page's share of long sentences. ``--write`` splits lines.
Code, tables, headings, comments and directives are not prose.
"""

import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
STYLE = ROOT / "docs" / "style.md"
LONG = 25
"""Number of words from which a sentence is long."""

_VERBATIM = re.compile(r"\s*(\||#|!\[|<|\[\w+\]: |[-*_]{3,}$)")
_ITEM = re.compile(r"(\s*)([-*+]|\d+\.)\s+")
_ABBREVIATION = re.compile(r"(\b(e\.g|i\.e|al|cf|vs|Eq|Eqs|Fig|Figs|Sec|resp|approx)\.|\.\.\.)$")
_END = re.compile(r"[.!?][*_\")\]]*$")
_OPENING = re.compile(r"[A-Z0-9`]|[*_\"(\[]+\w")


def pages() -> list[Path]:
    """Return every page of Markdown except the generated reference."""
    names = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md")
    docs = sorted((ROOT / "docs").rglob("*.md"))
    hand_written = (page for page in docs if not {"_build", "options"} & {*page.parts})
    return [*(ROOT / name for name in names), *hand_written]


def split(text: str) -> list[str]:
    """Return the sentences of a paragraph."""
    masked = re.sub(r"(`+).*?\1|\]\([^)]*\)", lambda match: re.sub(r"[^\]()`]", "x", match[0]), text)
    result, start = [], 0
    for space in re.finditer(" ", masked):
        sentence, following = masked[start : space.start()], masked[space.end() :]
        if _END.search(sentence) and not _ABBREVIATION.search(sentence) and _OPENING.match(following):
            result.append(text[start : space.start()])
            start = space.end()
    return [*result, text[start:]]


def blocks(text: str) -> Iterator[tuple[str, list[str], bool]]:
    """Yield the start, the lines and whether it is prose, of each paragraph, list item or other line.

    The start is the indentation of a paragraph or the marker of an item; its lines come without it.
    """
    start, lines, fence, in_comment = "", list[str](), "", False
    for line in text.splitlines():
        opening = re.match(r"\s*(`{3,}|:{3,}|~{3,})", line)
        in_comment = in_comment or "<!--" in line
        is_prose = bool(line.strip()) and not (fence or opening or in_comment or _VERBATIM.match(line))
        item = _ITEM.match(line)
        if lines and (item or not is_prose):
            yield start, lines, True
            lines = []
        if not is_prose:
            yield "", [line], False
            fence = "" if line.strip() == fence else fence or (opening[1] if opening else "")
            in_comment = in_comment and "-->" not in line
        elif lines:
            lines.append(line.strip())
        else:
            start = item[0] if item else line[: len(line) - len(line.lstrip())]
            lines = [line[len(start) :].strip()]
    if lines:
        yield start, lines, True


def formatted(text: str) -> str:
    """Return the page with each sentence of its prose on a line of its own."""
    result = []
    for start, lines, is_prose in blocks(text):
        first, *rest = split(" ".join(lines)) if is_prose else lines
        result += [start + first, *(" " * len(start) + line for line in rest)]
    return "\n".join(result) + "\n"


def sentences(text: str) -> list[str]:
    """Return the sentences of a page's prose."""
    return [sentence for _, lines, is_prose in blocks(text) if is_prose for sentence in split(" ".join(lines))]


@cache
def banned_words() -> re.Pattern[str]:
    """Return the words that prose must not have, from the table in docs/style.md."""
    section = STYLE.read_text(encoding="utf-8").partition("## Words that are not used")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (.+?) \|", section, re.MULTILINE)[2:]
    words = [re.escape(word).replace(r"\*", r"\w*") for cell in cells for word in cell.split(", ")]
    return re.compile(rf"(?<![\w-])({'|'.join(words)})(?![\w-])", re.IGNORECASE)


def banned_in(text: str) -> list[str]:
    """Return the banned words of a page, each with its sentence, row or heading."""
    rows = re.findall(r"^[|#].*", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    plain = (re.sub(r"`[^`]*`|\]\([^)]*\)", "", line) for line in [*sentences(text), *rows])
    return [f"{match[0]}: {line}" for line in plain for match in banned_words().finditer(line)]


def word_count(sentence: str) -> int:
    """Return the number of words in a sentence; inline code is one."""
    return len(re.findall(r"[^\W_][\w.,%'-]*", re.sub(r"`[^`]*`", "code", sentence)))


def main() -> None:
    for page in pages():
        text = page.read_text(encoding="utf-8")
        if "--write" in sys.argv and text != formatted(text):
            page.write_text(text := formatted(text), encoding="utf-8")
        words = [word_count(sentence) for sentence in sentences(text)]
        share = sum(count >= LONG for count in words) / max(1, len(words))
        problem = "" if text == formatted(text) else ", not one sentence a line"
        print(f"{page.relative_to(ROOT)!s:36} {sum(words):6} words, {share:4.0%} of {len(words)} long{problem}")
        if page != STYLE:
            for problem in banned_in(text):
                print(f"    {problem}")


if __name__ == "__main__":
    main()
