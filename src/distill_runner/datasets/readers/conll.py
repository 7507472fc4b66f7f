"""CoNLL files: a word with its tags in each line, and blank lines between sentences; also CoNLL-U."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping

from distill_runner.datasets.readers.table import FileProblem, FileRecord, FilesTable, WordLines
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


class ConllTable(FilesTable):
    """CoNLL files with the same number of columns, which tabs separate, or else blanks.

    A row is a sentence: ``tokens`` and the other columns are lists. A line that begins with # is a comment, unless it
    has as many columns as other lines and its last value is a tag. Lines of ``-DOCSTART-`` are left out.

    Args:
        files: the files by name.
    Raises:
        FileProblem: a line has another number of columns, or may be a comment or a word.
    """

    untyped = True

    def __init__(self, origin: str, files: Mapping[str, TextFile]) -> None:
        super().__init__(origin, files)
        self._files = list(files.values())

    def rows_of(self, number: int) -> Iterator[dict[str, WordLines]]:
        record, text_file = self.records[number], self._files[number]
        record.rows = record.lines = 0
        lines = [line.rstrip(_BLANKS) for line in self.checked(number, text_file.lines())]
        record.lines = len(lines)
        names, rows = self._parsed(number, lines, record)
        record.remarks += text_file.remarks
        if self.column_names and names != self.column_names:
            problem = f"has the columns {', '.join(names)}, other files have {', '.join(self.column_names)}"
            raise FileProblem(problem, "Write all files of a split with the same columns.").of_file(record.name)
        self.column_names = names
        for row in rows:
            record.rows += 1
            yield {
                name: WordLines((values[column] for _, values in row), [line for line, _ in row])
                for column, name in enumerate(names)
            }

    def _parsed(
        self, number: int, lines: list[str], record: FileRecord
    ) -> tuple[list[str], list[list[tuple[int, list[str]]]]]:
        """Return the names of the columns, and the sentences as pairs of a line's number and its values."""
        has_tabs = _has_tabs(lines)
        separated = [_separated(line, has_tabs) for line in lines]
        count = _most_frequent_count(separated)
        tags = {values[-1] for values in separated if len(values) == count and not values[0].startswith(_COMMENT)}
        sentences: list[list[tuple[int, list[str]]]] = [[]]
        documents = comments = 0
        for line_number, values in enumerate(separated, start=1):
            if not any(value.strip() for value in values):
                sentences.append([])
            elif values[0] == DOCUMENT:
                documents += 1
                sentences.append([])
            elif values[0].startswith(_COMMENT) and (len(values) != count or not _is_tagged(values, tags, has_tabs)):
                comments += 1
            elif len(values) != count:
                sides = "tabs" if has_tabs else "blanks"
                problem = f"has {len(values)} columns in line {line_number}, between {sides}, and {count} in most lines"
                remedy = "Each line needs a word and its tags, and a blank line ends a sentence."
                raise FileProblem(problem, remedy).of_file(record.name if len(self.records) > 1 else "")
            else:
                sentences[-1].append((line_number, values))
        sentences = [sentence for sentence in sentences if sentence]
        names, sentences = _named_columns(count, sentences, record)
        record.remarks.append(f"{sum(map(len, sentences)):,} words")
        if documents:
            record.remarks.append(f"{documents:,} lines of {DOCUMENT}")
        if comments:
            record.remarks.append(f"{comments:,} comments")
        return names, sentences


def is_conll(file: TextFile) -> bool:
    """Return whether a file of text has a word and its tags in each line: as many columns, the first or last a tag."""
    sample = []
    for line in file.lines():
        if line.strip() and not line.startswith((_COMMENT, DOCUMENT)):
            sample.append(line.rstrip())
        if len(sample) == SAMPLE_LINES:
            break
    separated = [_separated(line, _has_tabs(sample)) for line in sample]
    count = _most_frequent_count(separated)
    usual = [values for values in separated if len(values) == count]
    if count < 2 or len(usual) < MIN_USUAL * len(sample):
        return False
    return any(all(_TAG.fullmatch(values[column]) for values in usual) for column in (0, -1))


def _separated(line: str, has_tabs: bool) -> list[str]:
    """Return the columns of a line."""
    line = line.strip(_BLANKS)
    return [value.strip(_BLANKS) for value in line.split("\t")] if has_tabs else _GAP.split(line)


def _is_tagged(values: list[str], tags: set[str], has_tabs: bool) -> bool:
    """Return whether a line that begins with # and has as many columns as others is a word with a tag.

    Args:
        tags: tags of the lines that do not begin with #.
    Raises:
        FileProblem: it may be both: a comment, or a word with a plain tag that no other word has.
    """
    word, tag = values[0], values[-1]
    if len(values) == 1 or tag in tags:
        return True
    if tags and all(map(_TAG.fullmatch, tags)):
        return _TAG.fullmatch(tag) is not None
    if word == _COMMENT or word.startswith(f"{_COMMENT} ") or not tags:
        return False
    if has_tabs:
        return True
    problem = f"has '{' '.join(values)}', which may be a comment, or a word with the tag {tag}"
    raise FileProblem(problem, "Separate the columns by tabs, or write comments with a blank after #.")


def _require_words_first(first_columns: list[list[str]]) -> None:
    """Check that the first column holds words.

    Args:
        first_columns: the first column of each sentence of several words.
    Raises:
        FileProblem: in all sentences it counts the words (GermEval), or names the document (CoNLL-2012).
    """
    are_constant = len(first_columns) > 1 and all(len({*column}) == 1 for column in first_columns)
    if first_columns and (are_constant or all(map(_is_index, first_columns))):
        problem = f"has {', '.join(first_columns[0][:3])} in its first column, which is that of the words"
        raise FileProblem(problem, "Remove the column of numbers or documents, so that the words come first.")


def _is_index(column: list[str]) -> bool:
    """Return whether a column counts the words of its sentence, from 0 or 1."""
    return column in ([str(number + start) for number in range(len(column))] for start in (0, 1))


def _has_tabs(lines: list[str]) -> bool:
    return all("\t" in line for line in lines if line.strip() and not line.startswith((_COMMENT, DOCUMENT)))


def _most_frequent_count(separated: list[list[str]]) -> int:
    counts = Counter(len(values) for values in separated if any(values) and not values[0].startswith(_COMMENT))
    counts = counts or Counter(len(values) for values in separated if any(values))
    return counts.most_common(1)[0][0] if counts else 1


def _named_columns(
    count: int, sentences: list[list[tuple[int, list[str]]]], record: FileRecord
) -> tuple[list[str], list[list[tuple[int, list[str]]]]]:
    """Return the names of the columns in the order of the values, after columns without a name are dropped."""
    rows = [values for sentence in sentences for _, values in sentence]
    if count == UNIVERSAL and all(values[0][0].isdigit() for values in rows):
        record.remarks.append("CoNLL-U")
        # Words such as "2-3" stand for several words, and "2.1" for none in the text.
        sentences_of_words = [
            [(line, [values[1], values[3]]) for line, values in sentence if values[0].isdigit()]
            for sentence in sentences
        ]
        return [WORDS, UPOS], [sentence for sentence in sentences_of_words if sentence]
    if count > 2:
        _require_words_first([[values[0] for _, values in sentence] for sentence in sentences if len(sentence) > 1])
    names = COLUMNS.get(count) or [WORDS, *(f"column_{number}" for number in range(2, count)), TAGS]
    of_tags = [all(_TAG.fullmatch(values[column]) for values in rows) for column in (0, -1)]
    if count == 2 and of_tags == [True, False]:
        record.remarks.append("tags in front of the words")
        return [TAGS, WORDS], sentences
    if count > 1:
        record.remarks.append(f"the tag is the last of {count} columns")
    return list(names), sentences
