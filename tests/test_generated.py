"""Folders and files with one odd key each, drawn from a seed: read as their peer reads them, refused, or named.

``FAULTS=long`` (``make faults``) draws thousands of cases, other runs a few.
"""

import csv
import gzip
import io
import json
import logging
import random
import re
import shutil
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

import datasets
import numpy as np
import pandas
import pyarrow
import pytest
import transformers
import yaml
from datasets.packaged_modules.csv.csv import CsvConfig
from seqeval.metrics.sequence_labeling import get_entities

from distill_runner.common.errors import UserError
from distill_runner.datasets.corpora import CorpusPart
from distill_runner.datasets.readers.content import read_table
from distill_runner.datasets.tokenization import Examples
from distill_runner.deploy.folder import ModelFolder
from distill_runner.models.build import build
from distill_runner.models.config import ModelConfig
from distill_runner.models.sources import resolve_source
from distill_runner.tasks import make_task
from distill_runner.tasks.vectors.task import pair_similarities
from distill_runner.tasks.vectors.texts import TextRows, write_texts
from distill_runner.training.data import predict
from distill_runner.training.devices import Device
from faults.forked import LONG
from helpers import foreign_folders, tiny_tokenizers
from helpers.sentence_folders import folder_with

pytestmark = [pytest.mark.faults] if LONG else []
Case = tuple[Callable[[], Any], Callable[[], Any], str]
"""What the peer reads, what is read here, and words of the account that excuse a difference.

Without words, the case must be read.
"""
NONE = "no words"
TEXTS = ["a b c", "d", "E f G h i j a b", "j i h g", "a b c d e f g h i j " * 3]
FIELDS: dict[str, Any] = {"name": "own", "metrics": None, "epochs": 1, "validation": {"v": "validation"}}


def another(rng: Any, value: Any) -> Any:
    """Another value of the same type."""
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int | float):
        return rng.choice([one for one in (0, 1, 2, 8, value + 1, -value, value / 4) if one != value])
    if isinstance(value, str):
        words = ["cls", "sigmoid", "mean", "max", "relu", "dot", "none", "a", value.upper(), value + "2"]
        return "left" if value == "right" else rng.choice(words)
    if isinstance(value, dict) and value:
        return value | {(key := rng.choice(sorted(value))): another(rng, value[key])}
    return rng.choice([[], ["a"], value[::-1]]) if isinstance(value, list) else {"a": 1}


def with_odd_key(rng: Any, folder: Path, **further: Any) -> str:
    """Give one key of one metadata file another value, or the file another value of a further key."""
    files = [file for file in folder.rglob("*.json") if "config" in file.name or file.name == "modules.json"]
    content = json.loads((file := rng.choice(sorted(files))).read_text())
    entry = rng.choice(content) if isinstance(content, list) else content
    key = rng.choice(sorted({*entry, *further, "a_new_key"}))
    entry[key] = another(rng, entry.get(key, further.get(key)))
    file.write_text(json.dumps(content))
    return re.escape(f"{key}=")


def sentence_encoder(rng: Any, folder: Path) -> Case:
    library: Any = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    pooling = {"pooling_mode": rng.choice(["mean", "cls", "lasttoken"]), "include_prompt": rng.random() < 0.5}
    dense = rng.choice([None, (5, f"torch.nn.modules.activation.{rng.choice(['Tanh', 'GELU', 'SiLU'])}")])
    texts = {"query": "a b: ", "document": "c ", "passage": "d e ", "own": "query: "}
    prompts = {name: texts[name] for name in texts if rng.random() < 0.5}
    own = {"prompts": prompts, "default_prompt_name": rng.choice([None, *prompts])}
    own["similarity_fn_name"] = rng.choice(["cosine", "dot", "euclidean", "manhattan"])
    folder_with(folder, pooling, dense, rng.random() < 0.5, own)
    if rng.random() < 0.7:
        library.SentenceTransformer(str(folder), device="cpu").save(str(folder))
    key = with_odd_key(rng, folder, truncate_dim=8, truncation_side="right", padding_side="right", max_seq_length=9)

    def expected() -> Any:
        model = library.SentenceTransformer(str(folder), device="cpu")
        queries, documents = model.encode_query(TEXTS), model.encode_document(TEXTS)
        vectors = model.encode(TEXTS), queries, documents
        return [array.tolist() for array in (*vectors, model.similarity(queries, documents))]

    def actual() -> Any:
        source, vectors = resolve_source(str(folder)), list[Any]()
        limit = ModelFolder.read(str(folder)).task.num_positions
        for kind in ("embeddings", "retrieval"):
            task = make_task(type=kind, dataset="d", max_length=limit, **FIELDS).with_model(lambda: [source])
            model = build(ModelConfig(source=str(folder), head="keep"), task.head)
            for prompt in dict(sorted(task.prompts.items(), reverse=True)).values():
                with TemporaryDirectory() as scratch:
                    write_texts(Path(scratch), Examples([TEXTS], None), source.tokenizer(), limit, [prompt])
                    vectors.append(predict(model, TextRows(Path(scratch)), Device.from_name("cpu", "fp32")))
        rows = [np.broadcast_to(row, vectors[2].shape) for row in vectors[1]]
        scores = [pair_similarities(row, vectors[2], task.similarity) for row in rows]
        return [one.tolist() for one in (*vectors, np.array(scores))]

    return expected, actual, key


@cache
def classifier_of(family: str, count: int) -> Path:
    """A model with all keys of its configuration, and a tokenizer that cuts at 24 tokens."""
    names = dict(enumerate(["bad", "good", "so-so"][:count]))
    folder = foreign_folders.save(Path(mkdtemp()), "classes", family, id2label=names)
    transformers.AutoConfig.from_pretrained(folder).to_json_file(folder / "config.json", use_diff=False)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_max_length": 24}))
    return folder


def classifier(rng: Any, folder: Path) -> Case:
    count, key = rng.choice([1, 2, 3]), "problem_type="
    shutil.copytree(classifier_of(rng.choice(foreign_folders.FAMILIES), count), folder, dirs_exist_ok=True)
    content, names = json.loads((folder / "config.json").read_text()), ["bad", "good", "so-so"][:count]
    if rng.random() < 0.3:
        first, step = rng.choice([(0, 1), (1, 1), (0, -1), (0, 2)])
        values = rng.choice([names, list(range(count)), names[::-1]])
        ids = {str(first + step * index): value for index, value in enumerate(values)}
        labels = [{name: number for number, name in enumerate(own)} for own in (names, names[::-1])]
        content |= {"id2label": rng.choice([ids, dict([*ids.items()][::-1]), names, None])}
        content |= {"label2id": rng.choice([*labels, None])}
        content = {name: value for name, value in content.items() if value is not None}
    elif rng.random() < 0.3:
        kind = "label_classification"
        content["problem_type"] = rng.choice(["regression", f"single_{kind}", f"multi_{kind}"])
    (folder / "config.json").write_text(json.dumps(content))
    if content == json.loads((classifier_of(content["model_type"], count) / "config.json").read_text()):
        key = with_odd_key(rng, folder, function_to_apply="softmax", truncation_side="right", is_causal=False)
    (file := folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))

    def expected() -> Any:
        model: Any = transformers.pipeline("text-classification", model=str(folder), truncation=True)
        return [{str(one["label"]): one["score"] for one in model(text, top_k=None)} for text in TEXTS]

    def actual() -> Any:
        model = ModelFolder.read(str(folder), options={"columns": ["text"]})
        rows = [*csv.DictReader(io.StringIO(str(model.predict_file(file, "cpu")[0])))]
        names = model.task.head.names or ("",)
        columns = {f"p_{name}" if len(rows[0]) > 3 else "prediction": name for name in names}
        return [{name: float(row[column]) for column, name in columns.items()} for row in rows]

    return expected, actual, key


ROLES = {"bio": "BIBI", "iob1": "BIBI", "bioes": "BIES", "bilou": "BILU", "bmes": "BMES"}
FORMS = ["{r}-{t}", "{t}-{r}", "{r}_{t}", "{t}_{r}", "{r}/{t}", "{t}.{r}", "{r}:{t}", "{t}|{r}", "{r} {t}", "{t}({r})"]
FORMS += ["{r}+{t}", "<{r}-{t}>"]


def tags(rng: Any, folder: Path) -> Case:
    scheme, form = rng.choice([*ROLES]), rng.choice([*FORMS, "{r}{t}"])
    kinds = ["PER", "LOC", "A-B"][: rng.randint(1, 3)]
    begin, inside, end, single = list(ROLES[scheme])
    spell = rng.choice([str, str, str.lower, {"B": "Begin", "I": "Inside", "E": "end"}.get])
    rows = list[list[str]]()
    for _ in range(rng.choice([2, 6, 20])):
        rows.append(row := list[str]())
        for kind in rng.choices(["", "", *kinds], k=5):
            size, follows = rng.randint(1, 3), bool(row) and row[-1].endswith(f"-{kind}")
            roles = single if size == 1 else f"{begin}{inside * (size - 2)}{end}"
            if scheme in ("bio", "iob1"):
                roles = ("B" if scheme == "bio" or follows else "I") + "I" * (size - 1)
            row += [f"{role}-{kind}" for role in roles] if kind else ["O"]
    names = sorted({tag for row in rows for tag in row} - {"O"})
    if form not in FORMS and len(names) < 2 * len({tag[2:] for tag in names}):
        form = FORMS[0]  # without a mark, only two tags of a type show that they name roles
    spelled = {tag: form.format(r=spell(tag[0]) or tag[0], t=tag[2:]) for tag in names} | {"O": "O"}
    for tag in names[1:] if form in FORMS and rng.random() < 0.5 else ():  # some are written in another way
        spelled[tag] = rng.choice([spelled[tag]] * 3 + [tag, tag[2:], f"{tag[0]}_{tag[2:]}", "E-mail"])
    lines = "".join(json.dumps({"tokens": row, "ner_tags": [spelled[tag] for tag in row]}) + "\n" for row in rows)
    for split in ("train", "validation"):
        (folder / f"{split}.jsonl").write_text(lines)

    def expected() -> Any:
        letters = {"M": "I", "L": "E", "U": "S"}
        return [get_entities([letters.get(tag[0], tag[0]) + tag[1:] for tag in row]) for row in rows]

    def actual() -> Any:
        task = make_task(type="tokens", dataset=str(folder), **FIELDS).resolved()
        examples = task.examples("train")
        logging.getLogger("distill_runner").warning(task.account("train", examples, []).warnings)
        flat, bounds = examples.tag_arrays(task.tagset)
        own = [task.tagset.entities(flat[a:b], np.array([0, b - a])) for a, b in pairwise(bounds)]
        return [[(task.tagset.type_names[kind], a, b - 1) for a, b, kind in row.tolist()] for row in own]

    return expected, actual, "look like positions|do not fit BIOES"


VALUES = ["", " ", "007", "3.10", "1e3", "NA", 'he said "yes"', '"quoted"', "a, b", "a; b", "a\tb", "x|y", "two\nlines"]
VALUES += ["two\r\nlines", "ends\n", "naïve 日本 🙂", "\u2028\x0b\x85", "\\n", '\\"', "'", "\ufeffmark", "=1+1"]
BOM = "\ufeff"
ODD_VALUES = ["a,pos\nb,neg\n", "a\tpos\nb\tneg\n"]
"""Texts whose lines look like rows of a file, which may be refused."""


def table(rng: Any, folder: Path) -> Case:
    """By pandas, which reads its own files again, or joined by tabs."""
    marks = ["".join(rng.choices("\",;\t\n\\ ab'é", k=rng.randint(1, 8))) for _ in range(3)]
    values = [*VALUES, *marks, *rng.choice([[], [], ODD_VALUES])]
    frame = {"text": rng.choices(values, k=rng.randint(1, 12))}
    frame |= {"label": rng.choices(["neg", "pos", "0", "007", ""], k=len(frame["text"]))} if rng.random() < 0.8 else {}
    form, encoding = rng.choice([*["csv"] * 3, "CSV", "tsv", "tsv", "json", "jsonl", "ndjson", "parquet"]), "utf-8"
    data, text, all_text, standard = pandas.DataFrame(frame), "", "".join(frame["text"]), ODD_VALUES[0] not in values
    if "json" in form:
        orient = rng.choice(["records", "columns", "split", "index", "values"]) if form == "json" else "records"
        standard &= orient in ("records", "columns", "index")
        options: dict[str, Any] = {"orient": orient, "lines": form != "json"}
        text = data.to_json(force_ascii=rng.random() < 0.5, **options)
    elif form != "parquet":
        options = {"sep": "\t" if form == "tsv" else rng.choice(",,;\t|"), "quoting": rng.choice([0, 0, 1, 2])}
        ends = rng.choice(["\n", "\r\n"])
        if form == "tsv" and not {*"\t\r\n"} & {*all_text} and '""' not in all_text:
            options["quoting"] = csv.QUOTE_NONE
            text = ends.join("\t".join(row) for row in [[*frame], *zip(*frame.values(), strict=True)]) + ends
        else:
            text = data.to_csv(
                None, index=rng.random() < 0.1, header=rng.random() < 0.95, lineterminator=ends, **options
            )
        encoding = rng.choice(["utf-8"] * 3 + ["utf-8-sig", "utf-16", "utf-16-le", "cp1252", "latin-1"])
        standard &= form != "tsv" and text.startswith(("text", '"text"')) and len(frame) > 1 and "\r" not in all_text
        standard &= encoding.startswith("utf-8")
        if rng.random() < 0.1:
            text, standard = rng.choice([f"sep={options['sep']}\n", "\n"]) + text, False
    content = data.to_parquet() if form == "parquet" else text.encode(encoding, "replace")
    end = {"csv": ".gz", "jsonl": ".zst"}.get(form, "") if rng.random() < 0.2 else ""
    packed = pyarrow.compress(content, "zstd", asbytes=True) if end == ".zst" else gzip.compress(content)
    (folder / f"train.{form}{end}").write_bytes(packed if end else content)

    def expected() -> Any:
        if form == "parquet" or "json" in form:
            read = pandas.read_json(io.StringIO(text), dtype=False, **options) if text else data
        else:
            further = {"encoding": encoding, "dtype": str, "keep_default_na": False, "skip_blank_lines": len(frame) > 1}
            read = pandas.read_csv(io.BytesIO(content), skiprows=int(text.startswith("sep=")), **options, **further)
        return {column: list(map(str, read[column])) for column in frame}

    def actual() -> Any:
        option = None if encoding in ("utf-8", "utf-8-sig", "utf-16") or rng.random() < 0.2 else encoding
        read = read_table(CorpusPart(dataset=str(folder), columns=[*frame], encoding=option), "train").columns
        return {column: list(map(str, values)) for column, values in read.items()}

    return expected, actual, "" if standard else NONE


def card(rng: Any, folder: Path) -> Case:
    """As ``load_dataset`` reads the folder, with one key of its configurations for CSV."""
    files = ["train.csv", *rng.sample(["other.csv", "sub/train.csv", "dev.csv"], rng.randint(0, 2))]
    files = [f"data/train-0000{number}-of-00002.csv" for number in range(2)] if rng.random() < 0.2 else files
    for name in files:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(f"text,label\n{name},{rng.randint(0, 10)}\nsecond of {name},1\n")
    paths = [*files, files[:2], "*.csv", "**/*.csv", "**/train*", "**"]
    entry: dict[str, Any] = {"config_name": rng.choice(["default", "own"])}
    if rng.random() < 0.8 or (folder / "sub").exists():
        entry["data_files"] = rng.choice([[{"split": "train", "path": rng.choice(paths)}], rng.choice(paths)])
    entry |= {"data_dir": rng.choice(["sub", "data", "."])} if rng.random() < 0.1 else {}
    options = vars(CsvConfig())
    if rng.random() < 0.4:
        key = rng.choice([*sorted(options), *["skiprows", "nrows", "names"] * 9])
        values: list[Any] = [0, 1, "#", ";", ["label", "text"], ["x", "label"], {"text": "a"}]
        entry[key] = rng.choice(values) if options[key] is None else another(rng, options[key])
    names = rng.choice([[f"c{n}" for n in range(11)], {str(n): f"c{n}" for n in rng.sample(range(11), 11)}])
    features = [{"name": "text", "dtype": "string"}, {"name": "label", "dtype": {"class_label": {"names": names}}}]
    info = {"config_name": rng.choice([entry["config_name"], "default", None]), "features": features}
    second = {"config_name": "second", "data_files": files[0]}
    metadata: dict[str, Any] = {"configs": [entry, second][: rng.choice([1, 1, 2])]}
    metadata |= {"dataset_info": rng.choice([info, [info]])} if rng.random() < 0.4 else {}
    (folder / "README.md").write_text(f"{rng.choice(['', BOM])}---\n{yaml.safe_dump(metadata, sort_keys=False)}---\n")

    def expected() -> Any:
        with TemporaryDirectory() as cache_dir:
            own = datasets.load_dataset(str(folder), split="train", cache_dir=cache_dir)
            names = getattr(own.features["label"], "names", range(11))
            return sorted((row["text"], names[row["label"]]) for row in own)

    def actual() -> Any:
        task = make_task(dataset=str(folder), train="train", max_length=8, columns=["text"], label="label", **FIELDS)
        read = read_table(task, "train")
        names = read.class_names or range(11)
        return sorted(zip(read.columns["text"], [names[int(label)] for label in read.columns["label"]], strict=True))

    return expected, actual, NONE


ODD_KEYS: list[tuple[str, Any]] = [("rejected", True), ("type", "choices"), ("score", 0.1), ("kb_id", "Q1"), ("id", 3)]
ODD_KEYS += [("label", "ORG"), ("labels", ["ORG"]), ("labels", []), ("start", 1), ("end", 2), ("end_offset", 3)]
ODD_KEYS += [("text", "x"), ("meta", {}), ("parentID", 3), ("answer", "reject"), ("a_new_key", True)]


KEYS = [
    (),
    ("start", "end", "label"),
    ("start", "end", "entity_group"),
    ("start_offset", "end_offset", "label"),
    ("start", "end", "labels"),
]
UNITS = [len, len, lambda head: len(head.encode("utf-16-le")) // 2, lambda head: len(head.replace("\r", ""))]


def annotations(rng: Any, folder: Path) -> Case:
    """Spans of texts as tools export them."""
    text = rng.choice(["\U0001f642 Ann from New York", "Ann from New York ", "one\r\nAnn from New York"])
    places = [(text.index(word), text.index(word) + len(word)) for word in ("Ann", "New York")]
    spans = [[*place, kind] for place, kind in zip(places, ("PER", "LOC"), strict=True)]
    (key, value), is_plain = rng.choice(ODD_KEYS), rng.random() < 0.4  # without a key; with blanks, which are left out
    units = len if is_plain else rng.choice(UNITS)
    names, marks = rng.choice(KEYS), list[Any]()
    for begin, end, kind in spans:
        blanks = [is_plain and text[place : place + 1] == " " for place in (begin - 1, end)]
        bounds = units(text[: begin - blanks[0]]), units(text[: end + blanks[1]])
        marks.append([*bounds, [kind] if "labels" in names else kind])
    if names:
        quotes = [rng.choice([{}, {"text": text[begin:end]}]) for begin, end in places]
        marks = [dict(zip(names, mark, strict=True)) | quote for mark, quote in zip(marks, quotes, strict=True)]
    row = {"text": text, (label := rng.choice(["spans", "label", "entities", "ents"])): marks}
    target = rng.choice([row, marks[0] if names else row])
    target |= {} if key in target or is_plain else {key: value}
    is_left_out = row.get("answer") == "reject"
    lines = "\n".join(map(json.dumps, (row, {"text": "b", label: []}, {**row, "answer": "accept"})))
    for split in ("train", "validation"):
        (folder / f"{split}.jsonl").write_text(lines)

    def actual() -> Any:
        task = make_task(type="tokens", dataset=str(folder), **FIELDS).resolved()
        examples = task.examples("train")
        logging.getLogger("distill_runner").warning(examples.remarks)
        with TemporaryDirectory() as scratch:
            task.write(Path(scratch), examples, tiny_tokenizers.make("bert"))
        return [[[*span[:3]] for span in sentence.spans or ()] for sentence in examples.items]

    words = "" if is_plain else NONE if target is row else f"key {key}"
    return lambda: [spans] * (not is_left_out) + [[], spans], actual, words


def judgments(rng: Any, folder: Path) -> Case:
    """Qrels of BEIR, or with the columns of another program."""
    queries, documents = [f"q{number}" for number in range(4)], [f"d{number}" for number in range(6)]
    for name, ids in (("queries", queries), ("corpus", documents)):
        rows = [{"_id": key, "text": f"text of {key}", "title": "", "metadata": {}} for key in ids]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pairs = rng.sample([(query, document) for query in queries for document in documents], 9)
    truth = {pair: rng.choice([1, 2, 0, -1, 1]) for pair in pairs}
    own = ["query-id", "corpus-id", "score", *["iteration"] * rng.randint(0, 1)]
    names = rng.choice([own, rng.sample(own, len(own)), rng.sample(own, len(own)), own[1:]])
    lines = ["\t".join(rng.choice([names] * 9 + [["qid", "docid", "relevance"]]))][: rng.choice([1] * 9 + [0])]
    for number, ((query, document), gain) in enumerate(truth.items()):
        score = str(gain) if number else rng.choice([f"{gain}", f"{gain}", f"{gain}.0", f"{gain}.5", ""])
        values = {"query-id": query, "corpus-id": document, "score": score, "iteration": "0"}
        lines.append("\t".join(values[name] for name in names))
    (folder / "qrels").mkdir()
    (folder / "qrels" / "validation.tsv").write_text(rng.choice(["\n", "\r\n"]).join(lines) + "\n")

    def actual() -> Any:
        task = make_task(type="retrieval", dataset=str(folder), max_length=8, **FIELDS).resolved()
        ids = [*dict.fromkeys(query for query, _ in truth)]
        rows = task.examples("validation").judgments.relevance.tolist()
        return {(ids[query], documents[place]): gain for query, place, gain in rows}

    return lambda: truth, actual, NONE


LOADED = {one.__name__: one for one in (sentence_encoder, classifier)}
"""Families whose models take a second to load."""
FAMILIES = LOADED | {one.__name__: one for one in (tags, table, card, annotations, judgments)}


def same(one: Any, other: Any) -> bool:
    """Whether nested values are equal, but for the last digits of numbers."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(abs(one - other) < 2e-5) if isinstance(one, float) and isinstance(other, float) else bool(one == other)


def outcome(case: Case, account: Callable[[], str]) -> str:
    """What became of a case: equal, refused or named, or one that the peer cannot read."""
    expected, actual, words = case
    try:
        peer = expected()
    except Exception:
        return "peer fails"
    try:
        own = actual()
    except UserError as error:
        own = str(error)
    if isinstance(own, str):
        assert words, own
        assert len(own.splitlines()) <= 2, own
        return "refused"
    is_silent = "a_new_key" in words or not same(peer, own)  # a key that nothing reads is named, whatever it does
    assert not is_silent or (words and re.search(words, account())), (words, peer, own, account())
    return "equal" if same(peer, own) else "named"


COUNTS = {family: 1000 if LONG else 6 if family in LOADED else 50 for family in FAMILIES}


CASES = [(family, seed) for family in FAMILIES for seed in range(COUNTS[family])]


@pytest.mark.parametrize(("family", "seed"), [*CASES, ("sentence_encoder", 58)])  # was read otherwise, in silence
def test_a_case_is_read_as_by_its_peer_or_refused_or_named(
    family: str, seed: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    outcome(FAMILIES[family](random.Random(seed), tmp_path), lambda: caplog.text)
