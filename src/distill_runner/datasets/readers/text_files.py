"""Files of text: their encoding, compressed files, and plain text in lines or paragraphs."""

import bz2
import codecs
import gzip
import io
import lzma
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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
    b"\x28\xb5\x2f\xfd": "a zstd file",
    b"BZh": "a bzip2 file",
    b"\xfd7zXZ": "an xz file",
    b"PK\x03\x04": "a zip or Excel file",
    b"\xd0\xcf\x11\xe0": "an old Excel file",
    b"PAR1": "a Parquet file",
    b"ARROW1": "an Arrow file",
    b"%PDF": "a PDF file",
}
"""First bytes of files that people rename to .csv."""
MIN_NULLS = 0.1
"""Share of zero bytes from which a file is taken for UTF-16: half of them in English text."""


def _open_with_arrow(codec: str) -> Callable[[Path], Any]:
    def open_file(file: Path) -> Any:
        import pyarrow

        return pyarrow.CompressedInputStream(pyarrow.OSFile(str(file)), codec)

    return open_file


COMPRESSIONS: dict[str, Callable[[Path], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": _open_with_arrow("zstd"),
    ".lz4": _open_with_arrow("lz4"),
}
"""Extension of a compressed file -> function that opens it for reading bytes."""


@contextmanager
def _open_bytes(file: Path) -> Iterator[Any]:
    """Open a file, decompressed if its name says that it is compressed."""
    opener = COMPRESSIONS.get(file.suffix.lower(), lambda path: path.open("rb"))
    try:
        with opener(file) as stream:
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
        name = codecs.lookup(requested or "utf-8").name
        has_nulls = sample.count(0) > MIN_NULLS * len(sample)
        if mark is not None:
            if requested is not None and not name.startswith(mark.removesuffix("-sig")):
                problem = f"has the byte order mark of {mark.removesuffix('-sig').upper()}, not of {requested}"
                raise FileProblem(problem, f"{self.option}=null reads it as such.")
            return mark
        if has_nulls and not name.startswith(("utf-16", "utf-32")):
            order = "le" if sample[1::2].count(0) >= sample[::2].count(0) else "be"
            problem = "is UTF-16 without a byte order mark"
            raise FileProblem(problem, f"{self.option}=utf-16-{order}, or save it as UTF-8.")
        if requested is None:
            return "utf-8"
        keeps_ascii = b"a,b".decode(name, "replace") == "a,b"
        if _is_utf8(sample) and not has_nulls and not (keeps_ascii and (sample.isascii() or name.startswith("utf"))):
            problem = f"is UTF-8, which {self.option}={requested} would misread"
            raise FileProblem(problem, f"{self.option}=null, after saving the files of another encoding as UTF-8.")
        if name in ("utf-16", "utf-32"):
            raise FileProblem(f"has no byte order mark of {requested}", f"{self.option}={name}-le, or {name}-be.")
        return requested

    def _undecodable(self) -> FileProblem:
        """Return the problem of bytes that are not in the file's encoding, with what the first such line may be."""
        if self.encoding not in ("utf-8", "utf-8-sig"):
            return FileProblem(f"has bytes that are not {self.encoding}", f"Name its encoding: {self.option}=<name>")
        with _open_bytes(self.file) as stream:
            lines = enumerate(stream, start=1)
            number, line = next((number, line) for number, line in lines if not _is_utf8(line, final=True))
        text = line.decode("cp1252", "replace")
        start = next(position for position, char in enumerate(text) if ord(char) > 127)
        words = text[max(0, start - 20) : start + 20].replace("\t", " ").replace("\xa0", " ").strip("\r\n ")
        remedy = f"{self.option}=<the encoding that it was saved in>, or save it as UTF-8."
        if words.isprintable() and "\ufffd" not in words:
            remedy = f"{self.option}=cp1252 (Excel, Windows) if '{words}' is right, else the one that it was saved in."
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
