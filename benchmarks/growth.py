"""Measure costs that grow with the data: memory to tokenize or train a vocabulary, time to list and check a store.

    python -m benchmarks.growth tokens 10000 100000 1000000     peak MiB of a process, by rows of text
    python -m benchmarks.growth vocabulary 20000 80000          peak MiB, by paragraphs
    python -m benchmarks.growth store 100 1000 10000            seconds of ``distill-run store``, by artifacts
    python -m benchmarks.growth targets 500                     seconds to open an artifact of so many MiB, twice
    python -m benchmarks.growth corpus 100000 1000000           CPU seconds and peak MiB to tokenize a corpus, by rows,
                                                                with 1 and 2 threads, and killed in the middle
    python -m benchmarks.growth corpus_once 10000000            the same with one thread, not killed

Each number is measured in a separate process. Rows of text are drawn from the embedded corpus.
"""

import csv
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from itertools import chain, count, islice
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.machine import peak_memory
from benchmarks.tables import markdown


def main() -> None:
    what, *sizes = sys.argv[1:]
    if what == "one":
        name, size, folder = sizes
        print(MEASURES[name](int(size), Path(folder)))
        return
    rows = [[what, *sizes], [UNITS[what]]]
    for size in sizes:
        with TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "benchmarks.growth", "one", what, size, folder]
            rows[1].append(
                subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, encoding="utf-8").stdout.strip()
            )
    print(markdown(rows))


def tokens(rows: int, folder: Path) -> str:
    """Read and tokenize a CSV file of sentences with two labels; return peak MiB and seconds."""
    from transformers import AutoTokenizer

    from distill_runner.datasets.pretraining import train_wordpiece
    from distill_runner.datasets.splits import TokenSplit
    from distill_runner.tasks import make_task

    _in_another_process(_write_csv, rows, folder)
    (folder / "tokenizer").mkdir()
    train_wordpiece(_texts(1000), 2000, folder / "tokenizer")
    task = make_task(
        name="growth",
        dataset=str(folder),
        columns=["sentence"],
        labels=["no", "yes"],
        metrics=["accuracy"],
        max_length=128,
        epochs=1,
        validation={"validation": "validation"},
    )
    started = time.perf_counter()
    TokenSplit.write(folder, task.examples("train"), AutoTokenizer.from_pretrained(folder / "tokenizer"), 128)
    return f"{peak_memory():.0f} ({time.perf_counter() - started:.0f} s)"


def corpus_once(rows: int, folder: Path) -> str:
    """Tokenize rows of text as packed blocks with one thread; return what ``corpus`` does."""
    return corpus(rows, folder, (("one thread", 1, False),))


ALL_WAYS = (("one thread", 1, False), ("two threads", 2, False), ("killed", 2, True))


def corpus(rows: int, folder: Path, ways: Sequence[tuple[str, int, bool]] = ALL_WAYS) -> str:
    """Tokenize rows of text as packed blocks: with one thread, with two, and with two after SIGKILL in the middle.

    Return CPU seconds and peak MiB of each, bytes on disk for each token, and whether the files are equal.
    """
    from distill_runner.datasets.pretraining import train_wordpiece

    (folder / "tokenizer").mkdir()
    train_wordpiece(_texts(1000), 2000, folder / "tokenizer")
    (folder / "text").mkdir()
    _in_another_process(_write_csv, rows, folder / "text")
    parts, digests = list[str](), set[str]()
    for name, threads, is_killed in ways:
        output = folder / name
        output.mkdir()
        command = f"from benchmarks.growth import *; tokenize_corpus(Path({str(folder)!r}), {name!r}, {threads})"
        if is_killed:
            process = subprocess.Popen([sys.executable, "-c", command])
            while _documents_done(output) < rows // 2:
                if process.poll() is not None:
                    sys.exit(f"{rows} rows are too few: the process had ended before it was killed")
                time.sleep(0.01)
            process.kill()
            process.wait()
            name += f" after {_documents_done(output):,} rows, the second process"
        line = subprocess.check_output([sys.executable, "-c", command], text=True, encoding="utf-8").split()
        seconds, mebibytes, tokens, size, digest = line
        parts.append(f"{name}: {seconds} s, {mebibytes} MiB")
        digests.add(digest)
    equal = "files differ" if len(digests) > 1 else "equal files" if len(ways) > 1 else "one file"
    return "; ".join([*parts, f"{int(size) / int(tokens):.2f} bytes a token, {int(tokens):,} tokens, {equal}"])


def tokenize_corpus(folder: Path, name: str, threads: int) -> None:
    """Write the examples of ``folder/text`` into ``folder/name``; print CPU seconds, peak MiB, tokens, bytes, hash."""
    import hashlib

    import numpy as np
    import torch
    from transformers import AutoTokenizer

    from distill_runner.datasets.corpora import Corpus
    from distill_runner.datasets.pretraining import write_examples

    torch.set_num_threads(threads)
    part = {"dataset": str(folder / "text"), "columns": ["sentence"]}
    text = Corpus(name="growth", max_length=128, examples="packed", parts={"text": part})
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    started = time.process_time()
    write_examples(folder / name, text, "train", tokenizer)
    seconds, peak = time.process_time() - started, peak_memory()
    files = sorted((folder / name).rglob("*.npy"))
    digest = hashlib.sha256(b"".join(hashlib.file_digest(file.open("rb"), "sha256").digest() for file in files))
    num_tokens = len(np.load(folder / name / "ids.npy", mmap_mode="r"))
    print(f"{seconds:.0f} {peak:.0f} {num_tokens} {sum(file.stat().st_size for file in files)} {digest.hexdigest()}")


def _documents_done(folder: Path) -> int:
    """Return how many documents are tokenized, from the record of the process that does it."""
    files = list(folder.rglob("progress.json"))
    return int(json.loads(files[0].read_text(encoding="utf-8"))["documents"]) - 1 if files else 0


def vocabulary(texts: int, folder: Path) -> str:
    """Train a WordPiece vocabulary of 30,000 entries on Wikipedia (wiki_paragraphs in DISTILL_DATA_DIR)."""
    from distill_runner.datasets.pretraining import train_wordpiece

    started = time.perf_counter()
    train_wordpiece(_paragraphs(texts), 30_000, folder)
    return f"{peak_memory():.0f} ({time.perf_counter() - started:.0f} s)"


def store(artifacts: int, folder: Path) -> str:
    """Time ``distill-run store`` on a store that contains stages and, in turns, targets made from them."""
    from distill_runner.pipeline.store import Store, key_of

    target, teacher = Store(folder / "store"), ""
    for number in range(artifacts):
        stage = {"kind": "stage", "schema": 1, "stage": "student", "seed": number, "teacher": teacher}
        spec = {"kind": "targets", "schema": 1, "teacher": teacher, "seed": number} if number % 2 else stage
        target.get(spec, lambda place: print("{}", file=(place / "metrics.json").open("w", encoding="utf-8")))
        teacher = key_of(stage)
    started = time.perf_counter()
    command = [sys.executable, "-m", "distill_runner", "store", "--store", str(folder / "store")]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return f"{time.perf_counter() - started:.2f}"


def targets(mebibytes: int, folder: Path) -> str:
    """Time opening an artifact twice, in separate processes, as two points of a grid do."""
    from distill_runner.pipeline.store import Store

    def fill(place: Path) -> None:
        with (place / "cls.npy").open("wb") as file:
            for _ in range(mebibytes):
                file.write(random.randbytes(2**20))

    spec = {"kind": "targets", "schema": 1}
    Store(folder / "store").get(spec, fill)
    script = (
        "import sys, time; from pathlib import Path; from distill_runner.pipeline.store import Store\n"
        f"s = Store(Path(sys.argv[1])); t = time.perf_counter(); s.get({spec!r}, None)\n"
        "print(f'{time.perf_counter() - t:.3f}')"
    )
    command = [sys.executable, "-c", script, str(folder / "store")]
    return ", ".join(subprocess.check_output(command, text=True, encoding="utf-8").strip() for _ in range(2))


def _in_another_process(write: Callable[[int, Path], None], rows: int, folder: Path) -> None:
    """Write the data in another process, so that its memory is not counted."""
    command = f"from benchmarks.growth import *; {write.__name__}({rows}, Path({str(folder)!r}))"
    subprocess.run([sys.executable, "-c", f"from benchmarks.growth import {write.__name__}; {command}"], check=True)


def _write_csv(rows: int, folder: Path) -> None:
    with (folder / "train.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["sentence", "label"])
        table.writerows((text, ["no", "yes"][number % 2]) for number, text in enumerate(_texts(rows)))
    (folder / "validation.csv").write_text("sentence,label\nbad,no\ngood,yes\n", encoding="utf-8")


def _texts(count: int):  # type: ignore[no-untyped-def]
    """Return sentences of the embedded corpus, drawn with replacement."""
    from distill_runner.datasets.embedded import embedded_sentences

    sentences, draw = [text for texts in embedded_sentences("train").values() for text in texts], random.Random(0)
    return (draw.choice(sentences) for _ in range(count))


def _paragraphs(number: int):  # type: ignore[no-untyped-def]
    """Return paragraphs of Wikipedia, repeated if there are too few."""
    from distill_runner.datasets.corpora import Corpus

    wiki = {"dataset": "wiki_paragraphs", "columns": ["text"], "document_column": "title"}
    corpus = Corpus(name="wiki", max_length=128, parts={"wiki": wiki})
    return islice(chain.from_iterable(corpus.texts("train") for _ in count()), number)


MEASURES: dict[str, Callable[[int, Path], str]] = {
    "tokens": tokens,
    "vocabulary": vocabulary,
    "store": store,
    "targets": targets,
    "corpus": corpus,
    "corpus_once": corpus_once,
}
UNITS = {
    "tokens": "peak MiB",
    "vocabulary": "peak MiB",
    "store": "seconds",
    "targets": "seconds, first and second",
    "corpus": "CPU seconds, peak MiB",
    "corpus_once": "CPU seconds, peak MiB",
}

if __name__ == "__main__":
    main()
