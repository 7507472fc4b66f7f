"""Files of text: their encoding, compressed files, and the readers of plain text, JSON and CoNLL files."""

import bz2
import codecs
import gzip
import io
import json
import lzma
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import compress, islice
from pathlib import Path
from typing import Any

from distill_runner.common.errors import override
from distill_runner.datasets.readers.table import FileProblem, FileRecord, Reader, Row

SAMPLE_BYTES = 2**20
"""Bytes at the beginning of a file from which its encoding is checked."""
MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
"""Byte order marks and their encodings; that of UTF-32 begins with that of UTF-16."""
MAGIC = {
    b"\x1f\x8b": "a gzip file",
    b"PK\x03\x04": "a zip or Excel file",
    b"\xd0\xcf\x11\xe0": "an old Excel file",
    b"PAR1": "a Parquet file",
    b"%PDF": "a PDF file",
}
"""First bytes of files that people rename to .csv."""
MIN_NULLS = 0.1
"""Share of zero bytes from which a file is taken for UTF-16: half of them in English text."""


def _open_with_arrow(codec: str, file: Path) -> Any:
    import pyarrow

    return pyarrow.CompressedInputStream(pyarrow.OSFile(str(file)), codec)


COMPRESSIONS: dict[str, Callable[[Path], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": partial(_open_with_arrow, "zstd"),
    ".lz4": partial(_open_with_arrow, "lz4"),
}
"""Extension of a compressed file -> function that opens it for reading bytes."""


@contextmanager
def _open_bytes(file: Path) -> Iterator[Any]:
    """Open a file, decompressed if its name says that it is compressed."""
    try:
        with COMPRESSIONS.get(file.suffix.lower(), lambda path: path.open("rb"))(file) as stream:
            yield stream
    except (EOFError, lzma.LZMAError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise FileProblem(f"cannot be decompressed: {error}", "Download or write it again.") from error


class TextFile:
    """A file of text, read line by line.

    Attributes:
        file: path of the file, which may be compressed.
        encoding: its encoding: the one that its byte order mark names, else ``requested``, else UTF-8.
        newline: what ends its lines: ``\\n``, or ``\\r`` in files of old Macs. Lines keep it, and a ``\\r`` before it.
        remarks: what the file's encoding is, unless it is UTF-8.
    Args:
        requested: encoding that the user named; None accepts UTF-8, and what a byte order mark names.
        option: option that names the encoding, for messages.
    Raises:
        FileProblem: the file is not text, or has another encoding.
    """

    def __init__(self, file: Path, requested: str | None, option: str) -> None:
        self.file, self.option = file, option
        with _open_bytes(file) as stream:
            sample = stream.read(SAMPLE_BYTES)
        self.encoding = self._checked_encoding(sample, requested)
        text = codecs.getincrementaldecoder(self.encoding)("replace").decode(sample)
        self.newline = "\r" if "\r" in text and "\n" not in text else "\n"
        self.remarks = [] if self.encoding.startswith("utf-8") else [self.encoding]

    def lines(self) -> Iterator[str]:
        """Yield the lines with their ends.

        Raises:
            FileProblem: a line is not in the file's encoding.
        """
        with _open_bytes(self.file) as stream:
            try:
                yield from io.TextIOWrapper(io.BufferedReader(stream), encoding=self.encoding, newline=self.newline)
            except UnicodeError as error:
                raise self._undecodable() from error

    def _checked_encoding(self, sample: bytes, requested: str | None) -> str:
        if content := next((content for first, content in MAGIC.items() if sample.startswith(first)), None):
            remedy = f"Rename {self.file.name}, or save it as its name says."
            raise FileProblem(f"is {content}, which its name does not say", remedy)
        mark = next((encoding for first, encoding in MARKS if sample.startswith(first)), None)
        has_nulls = sample.count(0) > MIN_NULLS * len(sample)
        name = codecs.lookup(requested or mark or "utf-8").name
        own = name
        if mark or (_is_utf8(sample) and not has_nulls):
            own = (mark or "utf-8").removesuffix("-sig")
        keeps_ascii = b"a,b".decode(name, "replace") == "a,b"
        if requested and not name.startswith(own) and (mark or not sample.isascii() or not keeps_ascii):
            problem = f"is {own.upper()}, which {self.option}={requested} would misread"
            raise FileProblem(problem, "Save the other files as UTF-8, and set " + override(self.option, None))
        is_named = name.startswith(("utf-16-", "utf-32-")) or not (has_nulls or name in ("utf-16", "utf-32"))
        if mark is None and not is_named:
            order = "le" if sample[1::2].count(0) >= sample[::2].count(0) else "be"
            problem = "is UTF-16 without a byte order mark"
            raise FileProblem(problem, override(self.option, f"utf-16-{order}") + ", or save it as UTF-8.")
        return mark or requested or "utf-8"

    def _undecodable(self) -> FileProblem:
        """Return the problem of bytes that are not in the file's encoding, with what the first such line may be."""
        if self.encoding not in ("utf-8", "utf-8-sig"):
            return FileProblem(f"has bytes that are not {self.encoding}", override(self.option, "<its encoding>"))
        with _open_bytes(self.file) as stream:
            lines = enumerate(stream, start=1)
            number, line = next((number, line) for number, line in lines if not _is_utf8(line, final=True))
        text = line.decode("cp1252", "replace")
        start = next(position for position, char in enumerate(text) if ord(char) > 127)
        words = text[max(0, start - 20) : start + 20].replace("\t", " ").replace("\xa0", " ").strip("\r\n ")
        remedy = override(self.option, "<the encoding that it was saved in>") + ", or save it as UTF-8."
        if words.isprintable() and "\ufffd" not in words:
            remedy = override(self.option, "cp1252") + f" (Excel, Windows) if '{words}' is right, else its own one."
        return FileProblem(f"line {number} is not UTF-8", remedy)


def _is_utf8(sample: bytes, final: bool = False) -> bool:
    """Return whether a sample, which may end within a character unless it is ``final``, is UTF-8."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(sample, final)
    except UnicodeDecodeError:
        return False
    return True


class PlainTextReader(Reader):
    """Plain text with the column ``text``: a row for each paragraph, which blank lines separate, or each line.

    Args:
        by_line: whether each line is a row, blank lines too.
    """

    untyped = True
    names = ("text",)

    def __init__(self, text_file: TextFile, by_line: bool) -> None:
        self._file, self._by_line = text_file, by_line

    def rows(self, record: FileRecord, names: Sequence[str] | None) -> Iterator[Row]:
        record.lines = 0
        record.remarks += ["a text in each line" if self._by_line else "a text in each paragraph", *self._file.remarks]
        paragraph: list[str] = []
        for line in self._file.lines():
            record.lines += 1
            text = line.rstrip("\r\n")
            if self._by_line or text.strip():
                paragraph.append(text)
            if paragraph and (self._by_line or not text.strip()):
                yield {"text": "\n".join(paragraph)}
                paragraph = []
        if paragraph:
            yield {"text": "\n".join(paragraph)}


# JSON: lines of objects, a list of objects, columns, or articles in SQuAD's format. No value is converted.

ROWS_REMEDY = "Write an object for each row: pandas' to_json(file, orient='records', lines=True)."
SQUAD_REMEDY = "It needs data[].paragraphs[].{context, qas[].{id, question, answers[].{text, answer_start}}}."


class Decimal(float):
    """A fraction of a JSON file, which is printed as it is written there: 3.10."""

    _text: str

    def __new__(cls, text: str) -> "Decimal":
        number = super().__new__(cls, text)
        number._text = text
        return number

    def __str__(self) -> str:
        return self._text


_DECODER = json.JSONDecoder(parse_float=Decimal)


class JsonReader(Reader):
    """A JSON file; its columns are the keys of all rows, where a row may lack some.

    Args:
        has_lines: whether the name of the file says that each line is an object.
    """

    def __init__(self, text_file: TextFile, has_lines: bool) -> None:
        self._file, self._has_lines = text_file, has_lines

    def rows(self, record: FileRecord, names: Sequence[str] | None) -> Iterator[Row]:
        record.remarks += self._file.remarks
        start = list(islice((line for line in self._file.lines() if line.strip()), 2))
        record.lines = 0
        if start and self._is_lines(start):
            for line in self._file.lines():
                record.lines += 1
                if line.strip():
                    value = _decode(line, f"line {record.lines} ", "Repair or remove this line.")
                    yield _checked_row(value, f"line {record.lines}")
        elif start:
            text = "".join(self._file.lines())
            record.lines = text.count("\n") + (not text.endswith("\n"))
            value = _decode(text, "", "Repair the file, or write it again.")
            if isinstance(value, list) and value and isinstance(value[0], dict) and {"qas", "paragraphs"} & {*value[0]}:
                value = {"data": value if "paragraphs" in value[0] else [{"paragraphs": value}]}
            for number, row in enumerate(_rows_of_object(value, record) if isinstance(value, dict) else value):
                yield _checked_row(row, f"item {number}")

    def _is_lines(self, start: list[str]) -> bool:
        """Return whether each line is an object: the first is one, and it is not all of a ``.json`` file."""
        try:
            return isinstance(_DECODER.decode(start[0].strip()), dict) and (self._has_lines or len(start) > 1)
        except (ValueError, RecursionError):
            return False


def _decode(text: str, place: str, remedy: str) -> Any:
    try:
        value = _DECODER.decode(text.strip())
    except (ValueError, RecursionError) as error:
        reason = f"at character {error.pos + 1}: {error.msg}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise FileProblem(f"{place}is no JSON {reason}", remedy) from error
    return value if isinstance(value, dict | list) or place else [value]


def _checked_row(row: Any, place: str) -> Row:
    if not isinstance(row, dict):
        raise FileProblem(f"{place} is not an object but a {type(row).__name__}", ROWS_REMEDY)
    return row


def _rows_of_object(value: Row, record: FileRecord) -> list[Any]:
    """Return the rows of a file that is one object: SQuAD's articles, a list of rows, columns, or a single row."""
    articles = value.get("data")
    if isinstance(articles, list) and any(isinstance(item, dict) and "paragraphs" in item for item in articles):
        record.remarks.append("articles in SQuAD's format")
        return _squad_rows(articles)
    columns = list(value.values())
    are_columns = len(columns) > 1 and all(isinstance(column, list) for column in columns)
    are_columns = are_columns and len({*map(len, columns)}) == 1
    tables = [
        name for name, rows in value.items() if rows and isinstance(rows, list) and all(type(r) is dict for r in rows)
    ]
    if len(tables) == 1 and not are_columns:
        record.remarks.append(f"the list {tables[0]!r}")
        return list(value[tables[0]])
    if are_columns or (columns and not tables and all(isinstance(column, list) for column in columns)):
        columns = [dict(enumerate(column)) for column in columns]
    if columns and all(isinstance(column, dict) and column.keys() == columns[0].keys() for column in columns):
        if all(map(str.isdigit, value)) and not any(map(str.isdigit, map(str, columns[0]))):  # orient="index"
            record.remarks.append("objects by their numbers")
            return [{"index": number, **row} for number, row in value.items()]
        record.remarks.append("columns")  # as pandas' to_json writes them
        return [dict(zip(value, (column[key] for column in columns), strict=True)) for key in columns[0]]
    return [value]


def _squad_rows(articles: list[Any]) -> list[Row]:
    """Return the questions of articles in SQuAD's format, each with its context."""
    try:
        paragraphs = [paragraph for article in articles for paragraph in article["paragraphs"]]
        return [
            {"answers": [], **qa, "id": qa["id"], "question": qa["question"], "context": text["context"]}
            for text in paragraphs
            for qa in text["qas"]
        ]
    except (KeyError, TypeError) as error:
        raise FileProblem(f"is not in SQuAD's format ({type(error).__name__}: {error})", SQUAD_REMEDY) from error


# CoNLL: a word with its tags in each line, and blank lines between sentences; also CoNLL-U.

WORDS, TAGS, UPOS = "tokens", "ner_tags", "upos"
GOLD, PREDICTION, NO_TAGS = "gold", "prediction", frozenset({"O", "_"})
"""Names of two columns of tags of one scheme, in the order of conlleval, CRF++ and flair; and what names no entity."""
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
Sentence = list[tuple[int, Sequence[str]]]
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
        are_words = [bool(line.strip()) and not line.startswith((_COMMENT, DOCUMENT)) for line in lines]
        self.has_tabs = all("\t" in line for line in compress(lines, are_words))
        self.columns = list(map(self._columns, lines))
        of_words = [*compress(self.columns, are_words)] or [values for values in self.columns if any(values)]
        self.count = Counter(map(len, of_words)).most_common(1)[0][0] if of_words else 1
        self.tags = {values[-1] for values in of_words if len(values) == self.count} if any(are_words) else set()

    def _columns(self, line: str) -> tuple[str, ...]:
        line = line.strip(_BLANKS)
        # As tuples of texts, which the garbage collector does not visit again and again.
        return tuple([value.strip(_BLANKS) for value in line.split("\t")] if self.has_tabs else _GAP.split(line))

    def is_comment(self, values: Sequence[str]) -> bool:
        """Return whether a line is a comment; it may also be a word that begins with #, followed by a tag."""
        word, tag = values[0], values[-1]
        if not word.startswith(_COMMENT):
            return False
        if len(values) != self.count:
            return True
        if len(values) == 1 or tag in self.tags:
            return False
        if self.tags and all(map(_TAG.fullmatch, self.tags)):
            return not _TAG.fullmatch(tag)
        return word == _COMMENT or not self.tags or (self.has_tabs and word.startswith(f"{_COMMENT} "))


class ConllReader(Reader):
    """A CoNLL file. A row is a sentence: ``tokens`` and the other columns are lists of ``WordLines``.

    A line that begins with # is a comment, unless it has as many columns as other lines and its last value is a tag.
    Lines of ``-DOCSTART-`` are left out.

    Raises:
        FileProblem: a line has another number of columns.
    """

    untyped = True
    names: Sequence[str]

    def __init__(self, text_file: TextFile) -> None:
        lines = _Lines(list(text_file.lines()))
        self._num_lines = len(lines.columns)
        sentences: list[Sentence] = [[]]
        documents = comments = 0
        for number, values in enumerate(lines.columns, start=1):
            if not any(map(str.strip, values)) or values[0].startswith(DOCUMENT):
                documents += values[0].startswith(DOCUMENT)
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
        counts = {"words": sum(map(len, self._sentences)), f"lines of {DOCUMENT}": documents, "comments": comments}
        self._remarks += [f"{count:,} {what}" for what, count in counts.items() if count] + text_file.remarks

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
            sentence[:] = [(line, (values[1], values[3])) for line, values in sentence if values[0].isdigit()]
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
    # Columns of one scheme share half of their kinds of tags, -PER for B-PER and I-PER, or more, of the one with fewer.
    tags = [{values[column] for values in rows} - NO_TAGS for column in range(1, count)]
    kinds = [{re.sub("^[BIMELSU]-", "-", tag) for tag in own} for own in tags]
    shared = [len(own & kinds[-1]) / min(len(own), len(kinds[-1])) if own and kinds[-1] else 0 for own in kinds]
    of_last = [column for column, share in enumerate(shared, start=1) if share >= 0.5]
    names = [WORDS, *(f"column_{number}" for number in range(2, count + 1))]
    if len(of_last) < 2:
        names = COLUMNS.get(count, [*names[:-1], TAGS])
        return [*names], [f"the tag is the last of {count} columns"] if count > 1 else []
    if len(of_last) == 2:
        names[of_last[0]], names[-1] = GOLD, PREDICTION
    return names, [f"{', '.join(names[column] for column in of_last)} have tags of one scheme"]


def is_conll(file: TextFile) -> bool:
    """Return whether a file of text has a word and its tags in each line: as many columns, the first or last a tag."""
    words = (line for line in file.lines() if line.strip() and not line.startswith((_COMMENT, DOCUMENT)))
    lines = _Lines(list(islice(words, SAMPLE_LINES)))
    usual = [values for values in lines.columns if len(values) == lines.count]
    if lines.count < 2 or len(usual) < MIN_USUAL * len(lines.columns):
        return False
    return any(all(_TAG.fullmatch(values[column]) for values in usual) for column in (0, -1))
