"""Files of data, as people and programs write them: read back as they were, or refused by the name of the file."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from distill_runner.common.errors import UserError
from distill_runner.datasets.corpora import CorpusPart, TransferSet
from distill_runner.datasets.readers import content as contents
from distill_runner.datasets.readers.dataset import BY_CLASS, SplitSlice
from distill_runner.datasets.readers.table import TableRecord, recorded_tables
from distill_runner.tasks import make_task

Frame = dict[str, list[str]]


class Lines(CorpusPart):
    """A dataset whose ``.txt`` files have a text in each line, as those of a task."""

    lines_are_texts = True


def part(folder: Path, **fields: Any) -> CorpusPart:
    return CorpusPart(dataset=str(folder), columns=["text"], **fields)


def columns(folder: Path, *names: str, **fields: Any) -> Frame:
    return contents.read_columns(part(folder, **fields), "train", names or ("text",))


def record(folder: Path, name: str, content: bytes | str, **fields: Any) -> TableRecord:
    """What the reader says of one file."""
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with recorded_tables() as tables:
        columns(folder, **fields)
    return tables[-1]


def refusal(action: Callable[[], Any]) -> str:
    """The message of the error, in one or two lines of a width that a terminal has."""
    with pytest.raises(UserError) as caught:
        action()
    message = str(caught.value)
    assert len(message.splitlines()) <= 2
    assert all(len(line) < 400 for line in message.splitlines())
    return message


@pytest.mark.parametrize("values", [["007", "3.10"], ["NA", "null", "1e3", "2020-01-01", ""]], ids=["numbers", "mixed"])
def test_a_stream_of_csv_is_text_as_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: list[str]
) -> None:
    """``datasets`` reads 007 as 7, and NA as nothing, where the first rows look like it."""
    (tmp_path / "train.csv").write_text("text,other\n" + "".join(f'"{value}",1\n' for value in values))
    commit = SimpleNamespace(name=str(tmp_path), sha=None)
    monkeypatch.setattr("distill_runner.datasets.readers.hub.dataset_commit", lambda _data: commit)
    own = CorpusPart(dataset="acme/numbers", columns=["text"])
    assert [row["text"] for row in contents.read_rows(own, "train", download=False)] == values


# --- Rows lost or merged

LINES = [f"the film {number},{'pos' if number % 2 else 'neg'}\n" for number in range(30)]


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.integers(0, 29), st.integers(0, 29), st.booleans(), st.booleans())
@example(0, 29, True, False)
def test_a_wrong_quotation_mark_never_loses_rows(
    tmp_path: Path, first: int, second: int, at_end: bool, doubled: bool
) -> None:
    """pandas makes one text of all rows between two marks, and a user trains on 26 rows of 32."""
    lines = list(LINES)
    lines[first] = '"' + lines[first]
    if second != first:
        lines[second] = lines[second].replace(",", '",') if at_end else '"' * (1 + doubled) + lines[second]
    (tmp_path / "train.csv").write_text("text,label\n" + "".join(lines))
    message = refusal(lambda: columns(tmp_path))
    assert "train.csv" in message
    assert "quotation mark" in message


def test_blank_lines_of_one_column_are_rows(tmp_path: Path) -> None:
    """The numbers of predictions belong to the lines of the file."""
    found = record(tmp_path, "train.csv", "text\nfirst\n\nthird\n   \nfifth\n")
    assert columns(tmp_path) == {"text": ["first", "", "third", "   ", "fifth"]}
    assert (found.rows, found.files[0].lines) == (5, 6)


def test_what_the_reader_decides_is_recorded(tmp_path: Path) -> None:
    remarks = record(tmp_path, "train.csv", 'text;label\n"a\nb";1\n\nc;2\n').files[0].remarks
    assert remarks == ["separated by semicolons", "1 row of several lines", "1 blank line left out"]
    assert record(tmp_path, "train.csv", "text\nx\n".encode("utf-16")).files[0].remarks == ["utf-16"]


@pytest.mark.parametrize(
    "content",
    [
        'name,text,label\n"Smith, J","opens,pos\nb,bad film,neg\nc,nice film,pos\nd,ends here",neg\n'
        + "".join(f"n{number},film {number},{('neg', 'pos')[number % 2]}\n" for number in range(10)),
        'text,label\n"opens,pos\nbad film,neg\nnice film,pos\nends here",neg\nlast film,neg\n',
        'label,text\nneg,"opens\npos,ends here"\nneg,nice film\npos,bad film\n',
    ],
    ids=["a separator in an earlier value", "few rows", "labels in front"],
)
def test_rows_in_a_value_are_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "train.csv").write_text(content)
    assert "the quotation mark in line 2 swallows the rows up to line" in refusal(lambda: columns(tmp_path))


@pytest.mark.parametrize(
    "text",
    [
        "a list:\ngood film,pos\nbad film",
        "Hello,\nit broke",
        "Title: cheap, NO\nText: buy, NO\n",
        "A: why?\nB: why not?",
    ],
)
def test_texts_with_lines_like_rows_are_read(tmp_path: Path, text: str) -> None:
    """Letters and lists have commas too: one of the lines is no row, or none has a label."""
    content = "text,label\nHello,pos\n" + "".join(LINES) + f'"{text}",neg\n' * 2
    (tmp_path / "train.csv").write_text(content)
    assert columns(tmp_path)["text"][31:] == [text, text]
    content = (
        "label,text\npos,Hello\n" + "".join(f"pos,film {number}\n" for number in range(30)) + f'pos,"{text}"\n' * 2
    )
    (tmp_path / "train.csv").write_text(content)
    assert columns(tmp_path)["text"][31:] == [text, text]


@pytest.mark.parametrize(
    ("content", "texts"),
    [
        ('text\tlabel\n"Wait," he said\t0\n', ['"Wait," he said']),
        ('text\tlabel\nhe said "wait"\t0\n"wait"\t1\n', ['he said "wait"', '"wait"']),
        ('"text"\t"label"\n"wait"\t"0"\n', ["wait"]),
        ('text\tlabel\n"a\tb"\t0\n', ["a\tb"]),
        ('text\tlabel\n"he said ""wait"""\t0\n', ['he said "wait"']),
        ('text\tlabel\n"he said ""wait"""\t0\n"wait"\t0\n', None),
        ('text\tlabel\n"he said ""wait"""\t0\n   \nc\t0\n', ['he said "wait"', "c"]),
        ('text\tlabel\n"wait"\t0\n', None),
    ],
)
def test_marks_in_tsv_are_read_in_the_only_way(tmp_path: Path, content: str, texts: list[str] | None) -> None:
    """They are plain in GLUE's files, and enclose values in those of pandas."""
    (tmp_path / "train.tsv").write_text(content)
    if texts is None:
        assert "marks that may enclose values, or be a part of them" in refusal(lambda: columns(tmp_path))
    else:
        assert columns(tmp_path)["text"] == texts


# --- Encodings and forms


@given(
    st.binary(min_size=1, max_size=60), st.sampled_from([None, "cp1252", "utf-16", "utf-16-be", "shift_jis", "cp037"])
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_are_read_or_refused_in_two_lines(tmp_path: Path, content: bytes, encoding: str | None) -> None:
    """A file of another program under the name of a table: its bytes must not spoil the terminal either."""
    for name in ("train.csv", "train.jsonl", "train.txt"):
        file = tmp_path / name
        file.write_bytes(b"text\n" + content if name == "train.csv" else content)
        try:
            columns(tmp_path, encoding=encoding)
            message = ""
        except UserError as error:
            message = str(error)
        file.unlink()
        assert len(message.splitlines()) <= 2, message
        assert all(line.replace("\t", " ").isprintable() for line in message.split("\n")), message


def test_fractions_of_json_are_printed_as_they_are_written(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"text": 3.10}\n{"text": 123456789012345678901234567890}\n')
    assert list(map(str, columns(tmp_path)["text"])) == ["3.10", "123456789012345678901234567890"]


def test_lines_or_paragraphs_are_rows_of_plain_text(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("first\n\nsecond\nline\n")
    assert columns(tmp_path)["text"] == ["first", "second\nline"]
    data = Lines(dataset=str(tmp_path), columns=["text"])
    assert contents.read_columns(data, "train", ["text"])["text"] == ["first", "", "second", "line"]


# --- What is refused

PLAIN = b"text\na\n"
WIDE = "text\ncafe and more words\n"
POINTER, PAGE = b"version https://git-lfs.github.com/spec/v1\n", b"<html>404"
REFUSED: list[tuple[dict[str, Any], str]] = [
    # CSV that another reader would bend
    ({"train.csv": "text,label\nwell, good,1\n"}, "line 2 has 3 values, but the first line names 2"),
    ({"train.csv": "text,label\na,1\nb\n"}, "line 3 has 1 value, but the first line names 2"),
    ({"train.csv": "sep=;\ntext;label\na;1\nb\n"}, "line 4 has 1 value, but the first line names 2"),
    ({"train.csv": "text,text\na,b\n"}, "names the column 'text' twice"),
    ({"train.csv": "text,label\na,1\ntext,label\nb,0\n"}, "line 3 repeats the names of the first line"),
    ({"train.csv": 'text,label\n"he said \\"yes\\" twice",1\n'}, "line 2 goes on after the closing quotation mark"),
    ({"train.csv": "text;label,x\na;b,c\nd;e,f\n"}, "may be separated by commas or semicolons"),
    # JSON that is no table
    ({"train.json": '{"text": "a"}\n{"text": "b"\n'}, "line 2 is no JSON at character 13"),
    ({"train.json": '{"text": "a"}\n["b"]\n'}, "line 2 is not an object but a list"),
    ({"train.json": '{"data": [{"paragraphs": [{}]}]}'}, "is not in SQuAD's format"),
    # Bytes of another form: "damaged, download again" sends people with a file of Excel to the wrong place
    ({"train.csv": "text\ncafé\n".encode("cp1252")}, "encoding=cp1252 (Excel, Windows) if 'café' is right"),
    ({"train.csv": WIDE.encode("utf-16-le")}, "parts.encoding=utf-16-le"),
    ({"train.csv": WIDE.encode("utf-16-be")}, "parts.encoding=utf-16-be"),
    ({"train.csv": gzip.compress(PLAIN, mtime=0)}, "Rename train.csv"),
    ({"train.csv": b"PK\x03\x04 and so on"}, "Rename train.csv"),
    *(({f"train.{end}": POINTER}, f"train.{end} in") for end in ("csv", "jsonl", "parquet", "txt")),
    ({"train.csv": POINTER}, "Git LFS"),
    ({"train.parquet": PAGE}, "web page"),
    # Files of which two could be the split: a backup beside the data would double the training set
    ({"train.csv": PLAIN, "train-old.csv": PLAIN}, "could be train-old.csv, train.csv"),
    ({"train.csv": PLAIN, "data/train.csv": PLAIN}, "could be data/train.csv, train.csv in {folder}"),
    ({"train.csv": PLAIN, "train/a.csv": PLAIN}, "could be train.csv, train/a.csv in {folder}"),
    ({"train.csv": PLAIN, "train.csv.gz": PLAIN}, "could be train.csv, train.csv.gz in {folder}"),
    ({"train-00000-of-00003.csv": PLAIN, "train-00002-of-00003.csv": PLAIN}, "has 2 of the 3 parts"),
    ({"train.csv": PLAIN, "README.md": "\ufeff---\nconfigs: [\n---\n"}, "the head of its README.md is no YAML"),
    ({"train/a.png": b"", "train/metadata.csv": PLAIN}, "put images into train/<class>/"),
    # Formats that are not read
    ({"train.tsv": "#FORMAT=WebAnno TSV 3.3\n1-1\t0-1\ta\n"}, "Export it as CoNLL 2003"),
    *(
        ({name: b"PK", "validation.csv": PLAIN}, f"{name} in {{folder}} is of a format that is not read")
        for name in ("train.xlsx", "training.zip", "train.csv.zip", "train-00000-of-00001.feather")
    ),
]


@pytest.mark.parametrize(("files", "words"), REFUSED)
def test_what_could_be_misread_is_refused(tmp_path: Path, files: dict[str, Any], words: str) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    message = refusal(lambda: columns(tmp_path))
    assert words.format(folder=tmp_path) in message
    assert "download it again" not in message


def test_two_synonyms_are_refused(tmp_path: Path) -> None:
    for name in ("val.csv", "dev.csv"):
        (tmp_path / name).write_bytes(PLAIN)
    data = part(tmp_path, validation="validation")
    assert "could be val.csv or dev.csv" in refusal(lambda: contents.read_columns(data, "validation", ["text"]))


@pytest.mark.parametrize(
    ("written", "encoding", "words"),
    [
        ("utf-8", "cp1252", "is UTF-8, which parts.encoding=cp1252 would misread"),
        *(("ascii", name, f"is UTF-8, which parts.encoding={name}") for name in ("utf-16", "utf-32-be", "cp037")),
        ("utf-16", "latin-1", "is UTF-16, which parts.encoding=latin-1 would misread"),
        ("utf-16-le", "cp1252", "is UTF-16 without a byte order mark"),
        ("utf-16-le", "utf-16", "is UTF-16 without a byte order mark"),
        ("utf-8", "base64", "no such encoding"),
    ],
)
def test_an_encoding_that_would_misread_is_refused(tmp_path: Path, written: str, encoding: str, words: str) -> None:
    """One of two files is UTF-8: read as cp1252, its letters would become others without a word."""
    (tmp_path / "train.csv").write_bytes(f"text\n{'cafe' if written == 'ascii' else 'café'} words\n".encode(written))
    assert words in refusal(lambda: columns(tmp_path, encoding=encoding))


@pytest.mark.parametrize("content", ["", "text,label\n", "\n\n", "text,label\n,\n"])
@pytest.mark.parametrize("name", ["train.csv", "train.csv.gz"])
def test_a_file_without_rows_is_called_empty(tmp_path: Path, name: str, content: str) -> None:
    """Where the columns are inferred: "cannot be inferred" would blame their names."""
    (tmp_path / name).write_bytes(gzip.compress(content.encode()) if name.endswith("gz") else content.encode())
    assert "the split is empty" in refusal(lambda: contents.inspect_columns(part(tmp_path), "train"))


def test_parts_of_a_split_have_the_same_columns(tmp_path: Path) -> None:
    (tmp_path / "train-1.csv").write_text("text,label\na,1\n")
    (tmp_path / "train-2.csv").write_text("label,text\n2,b\n")
    assert columns(tmp_path, "text", "label") == {"text": ["a", "b"], "label": ["1", "2"]}
    (tmp_path / "train-2.csv").write_text("text,class\nb,2\n")
    message = refusal(lambda: columns(tmp_path))
    assert "train-2.csv has no column 'label', also 'class', unlike train-1.csv" in message
    (tmp_path / "train-2.csv").write_text("text,label\nb\n")
    assert "train-2.csv line 2 has 1 value" in refusal(lambda: columns(tmp_path))


# --- What else


@given(st.lists(st.sampled_from("abc"), min_size=2, max_size=60), st.floats(0.1, 0.9))
def test_a_slice_by_class_has_each_class_in_its_first_part(labels: list[str], share: float) -> None:
    """A rare class in the validation part alone could be neither learned nor scored."""
    cut = f"{100 * share:.2f}%"
    first, second = (SplitSlice(*ends, BY_CLASS).rows(len(labels), labels) for ends in (("", cut), (cut, "")))
    assert sorted([*first, *second]) == list(range(len(labels)))
    if len(first) >= len(set(labels)):
        assert {labels[row] for row in first} == set(labels)
    for label in set(labels):
        rows = [row for row in first if labels[row] == label]
        assert abs(len(rows) - share * labels.count(label)) < 2 + len(set(labels))


def test_what_is_read_from_a_file_is_in_its_fingerprint(tmp_path: Path) -> None:
    """A stored student must not be taken for that of other texts: another encoding is another text."""
    (tmp_path / "train.csv").write_text("text\na\n")
    plain = contents.data_fingerprint(part(tmp_path))
    assert contents.data_fingerprint(part(tmp_path, encoding="cp1252")) != plain


def classes_of(names: list[str] | None) -> Any:
    import datasets

    label = datasets.Value("int64") if names is None else datasets.ClassLabel(names=names)
    return datasets.Features({"text": datasets.Value("string"), "label": label}).arrow_schema


@pytest.mark.parametrize(("first", "second"), [(["a", "b"], ["a", "b"]), (["a", "b"], None), (None, ["a", "b"])])
def test_files_of_a_split_have_one_list_of_classes(
    first: list[str] | None, second: list[str] | None, tmp_path: Path
) -> None:
    """With the names of the first file alone, all labels of a second file with another order were wrong."""

    def write(number: int, names: list[str] | None) -> None:
        content = pyarrow.table({"text": ["x", "y"], "label": [0, 1]}, schema=classes_of(names))
        pyarrow.parquet.write_table(content, tmp_path / f"train-0000{number}-of-00002.parquet")

    write(0, first)
    write(1, second)
    fields = {"metrics": ["accuracy"], "max_length": 8, "epochs": 1, "columns": ["text"], "validation": {"v": "dev"}}
    task = make_task(name="own", dataset=str(tmp_path), train="train", labels=None, **fields)
    assert contents.read_table(task, "train").class_names == ["a", "b"]
    write(0, ["a", "b"])
    write(1, ["b", "a"])
    message = refusal(lambda: contents.read_table(task, "train"))
    assert "the classes of 'label' are ['a', 'b'] in train-00000-of-00002.parquet, but ['b', 'a'] in" in message


def test_what_is_no_text_is_not_read_as_one(tmp_path: Path) -> None:
    """NaN became the text "nan", and a list of words its Python form, with brackets and quotes."""
    (tmp_path / "train.jsonl").write_text('{"text": "one"}\n{"text": NaN}\n{"text": null}\n{}\n{"text": 2}\n')
    assert list(part(tmp_path).documents("train")) == [["one"], ["2"]]
    (tmp_path / "train.jsonl").write_text('{"text": "one"}\n{"text": ["a", "b"]}\n')
    assert "parts.columns=text: row 1 of split 'train' holds a list instead of a text" in refusal(
        lambda: list(part(tmp_path).documents("train"))
    )
    (tmp_path / "train.jsonl").write_text('{"text": "", "n": 0}\n{"text": "two", "n": 0}\n{"text": NaN, "n": 0}\n')
    inputs = {"name": "own", "parts": {"inputs": {"dataset": str(tmp_path), "columns": ["text", "n"]}}}
    assert TransferSet(**inputs).examples().texts == [["two"], ["0"]]
    (tmp_path / "train.jsonl").write_text('{"text": ["a"], "label": 1}\n{"text": ["b"], "label": 0}\n')
    inputs["parts"] = {"inputs": {"dataset": str(tmp_path), "columns": ["text"]}}
    assert "a row holds a list instead of a text" in refusal(lambda: TransferSet(**inputs).examples())


@pytest.mark.parametrize(("option", "words"), [("", ""), (", skiprows: 1", "with {'skiprows': 1} in its README.md")])
def test_a_card_names_classes_by_number_and_no_option_of_readers(option: str, words: str, tmp_path: Path) -> None:
    """``load_dataset`` would skip a row of this file."""
    names = {str(number): f"c{number}" for number in range(11)}
    info = f"dataset_info: {{features: [{{name: text, dtype: {{class_label: {{names: {json.dumps(names)}}}}}}}]}}"
    (tmp_path / "train.csv").write_text("text\n0\n")
    own = f"configs: [{{config_name: default, data_files: train.csv{option}}}]"
    (tmp_path / "README.md").write_text(f"---\n{info}\n{own}\n---\n")
    if words:
        assert words in refusal(lambda: columns(tmp_path))
    else:
        with contents.open_split(part(tmp_path), "train") as table:
            assert table.class_names == {"text": [*names.values()]}
