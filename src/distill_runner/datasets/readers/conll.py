"""CoNLL files: a word with its tags in each line, and blank lines between sentences; also CoNLL-U."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from distill_runner.datasets.readers.table import FileProblem, FileRecord, Reader, Row
from distill_runner.datasets.readers.text_files import TextFile

WORDS, TAGS, UPOS = "tokens", "ner_tags", "upos"
COLUMNS = {1: [WORDS], 4: [WORDS, "pos_tags", "chunk_tags", TAGS]}
"""Number of columns -> their names; of CoNLL-2003 for four. Otherwise the first is the word, the last the tag."""
DOCUMENT, UNIVERSAL = "-DOCSTART-", 10
"""Word that begins a document, and number of columns of CoNLL-U."""
_TAG = re.compile(r"O|[BIMELSU]-\S+")
_COMMENT, _BLANKS = "#", " \t\r\n"
_GAP = re.compile(r"[ \t]+")
"""Between columns without tabs. Other white space, such as a no-break space, belongs to a word."""
SAMPLE_LINES, MIN_USUAL = 200, 0.75
"""Lines of a file of text that are looked at, and the share of them that must have the same number of columns."""
Sentence = list[tuple[int, list[str]]]
"""Number of the line and values of each word."""


class WordLines(list[Any]):
    """Values of the words of a sentence, and the number of the line that each one is in, for messages."""

    def __init__(self, values: Iterable[Any], lines: Iterable[int]) -> None:
        super().__init__(values)
        self.lines = list(lines)


class _Lines:
    """Lines of a CoNLL file, divided into columns by tabs if all lines have them, or else by blanks.

    Attributes:
        count: number of columns of most lines that do not begin with #.
    """

    def __init__(self, lines: Sequence[str]) -> None:
        words = [line for line in lines if line.strip() and not line.startswith((_COMMENT, DOCUMENT))]
        self.has_tabs = all("\t" in line for line in words)
        self.columns = list(map(self._columns, lines))
        of_words = list(map(self._columns, words)) or [values for values in self.columns if any(values)]
        self.count = Counter(map(len, of_words)).most_common(1)[0][0] if of_words else 1
        self.tags = {values[-1] for values in of_words if len(values) == self.count} if words else set()

    def _columns(self, line: str) -> list[str]:
        line = line.strip(_BLANKS)
        return [value.strip(_BLANKS) for value in line.split("\t")] if self.has_tabs else _GAP.split(line)

    def is_comment(self, values: list[str]) -> bool:
        """Return whether a line is a comment; it may also be a word that begins with #, followed by a tag.

        Raises:
            FileProblem: it may be both: the tag is a plain one that no other word has.
        """
        word, tag = values[0], values[-1]
        if not word.startswith(_COMMENT):
            return False
        if len(values) != self.count:
            return True
        if len(values) == 1 or tag in self.tags:
            return False
        if self.tags and all(map(_TAG.fullmatch, self.tags)):
            return not _TAG.fullmatch(tag)
        if word == _COMMENT or not self.tags:
            return True
        if self.has_tabs:
            return word.startswith(f"{_COMMENT} ")
        problem = f"has '{' '.join(values)}', which may be a comment, or a word with the tag {tag}"
        raise FileProblem(problem, "Separate the columns by tabs, or write comments with a blank after #.")


class ConllReader(Reader):
    """A CoNLL file. A row is a sentence: ``tokens`` and the other columns are lists of ``WordLines``.

    A line that begins with # is a comment, unless it has as many columns as other lines and its last value is a tag.
    Lines of ``-DOCSTART-`` are left out.

    Raises:
        FileProblem: a line has another number of columns, or may be a comment or a word.
    """

    untyped = True
    names: Sequence[str]

    def __init__(self, text_file: TextFile) -> None:
        lines = _Lines(list(text_file.lines()))
        self._num_lines = len(lines.columns)
        sentences: list[Sentence] = [[]]
        documents = comments = 0
        for number, values in enumerate(lines.columns, start=1):
            if not any(map(str.strip, values)) or values[0] == DOCUMENT:
                documents += values[0] == DOCUMENT
                sentences.append([])
            elif lines.is_comment(values):
                comments += 1
            elif len(values) != lines.count:
                separators = "tabs" if lines.has_tabs else "blanks"
                problem = f"has {len(values)} columns in line {number}, between {separators}, and {lines.count} in most"
                remedy = "Each line needs a word and its tags, and a blank line ends a sentence."
                raise FileProblem(f"{problem} lines", remedy)
            else:
                sentences[-1].append((number, values))
        self._sentences: list[Sentence] = [sentence for sentence in sentences if sentence]
        self.names, self._remarks = _named_columns(lines.count, self._sentences)
        self._remarks += [f"{sum(map(len, self._sentences)):,} words"]
        self._remarks += [f"{documents:,} lines of {DOCUMENT}"] * bool(documents)
        self._remarks += [f"{comments:,} comments"] * bool(comments)
        self._remarks += text_file.remarks

    def rows(self, record: FileRecord, names: Sequence[str] | None) -> Iterator[Row]:
        record.lines = self._num_lines
        record.remarks += self._remarks
        for sentence in self._sentences:
            lines = [line for line, _ in sentence]
            columns = zip(*(values for _, values in sentence), strict=True)
            yield {name: WordLines(values, lines) for name, values in zip(self.names, columns, strict=True)}


def _named_columns(count: int, sentences: list[Sentence]) -> tuple[list[str], list[str]]:
    """Return the names of the columns and what was decided; removes the columns of CoNLL-U that have no name here.

    Raises:
        FileProblem: in all sentences, the first column counts the words (GermEval) or names the document (CoNLL-2012).
    """
    rows = [values for sentence in sentences for _, values in sentence]
    if count == UNIVERSAL and all(values[0][:1].isdigit() for values in rows):
        # Words such as "2-3" stand for several words, and "2.1" for none in the text.
        for sentence in sentences:
            sentence[:] = [(line, [values[1], values[3]]) for line, values in sentence if values[0].isdigit()]
        sentences[:] = [sentence for sentence in sentences if sentence]
        return [WORDS, UPOS], ["CoNLL-U"]
    firsts = [[values[0] for _, values in sentence] for sentence in sentences if len(sentence) > 1]
    are_constant = len(firsts) > 1 and all(len(set(first)) == 1 for first in firsts)
    are_counted = all(first == [str(i + int(first[0] == "1")) for i in range(len(first))] for first in firsts)
    if count > 2 and firsts and (are_constant or are_counted):
        problem = f"has {', '.join(firsts[0][:3])} in its first column, which is that of the words"
        raise FileProblem(problem, "Remove the column of numbers or documents, so that the words come first.")
    are_tags = [all(_TAG.fullmatch(values[column]) for values in rows) for column in (0, -1)]
    if count == 2 and are_tags == [True, False]:
        return [TAGS, WORDS], ["tags in front of the words"]
    names = COLUMNS.get(count) or [WORDS, *(f"column_{number}" for number in range(2, count)), TAGS]
    return list(names), [f"the tag is the last of {count} columns"] if count > 1 else []


def is_conll(file: TextFile) -> bool:
    """Return whether a file of text has a word and its tags in each line: as many columns, the first or last a tag."""
    words = (line for line in file.lines() if line.strip() and not line.startswith((_COMMENT, DOCUMENT)))
    lines = _Lines(list(islice(words, SAMPLE_LINES)))
    usual = [values for values in lines.columns if len(values) == lines.count]
    if lines.count < 2 or len(usual) < MIN_USUAL * len(lines.columns):
        return False
    return any(all(_TAG.fullmatch(values[column]) for values in usual) for column in (0, -1))
