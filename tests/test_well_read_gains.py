"""The percentages that section 6 of the well-read students derives from its figures, by hand from made-up scores."""

from typing import Any

from benchmarks.well_read_gains import derived_cells, rows, value
from helpers.fake_results import result

TINY, MINI, BASE = (2, 128), (4, 256), (12, 768)


def run(method: str, size: tuple[int, int], score: float, task: str = "mnli", **changes: Any) -> dict[str, Any]:
    """A finished run of a method, whose score is in percent."""
    transfer = {"mnli": "nli_star", "rte": "nli_star", "book_reviews": "amazon_books"}[task]
    used = None if method in ("basic", "pf") else {"name": transfer, "size": None}
    student = {"num_layers": size[0], "width": size[1], "init": "new weights"}
    made = {"method": method, "task": task, "score": score / 100, "student": student, "transfer": used}
    return result(**(made | {"command": f"distill-run method={method} corpus=books_wiki", "published": None} | changes))


def of_text(results: list[dict[str, Any]]) -> dict[str, str]:
    """What the runs have for each number of the text, without those that they do not have."""
    return {f"{place} {quantity}": here for place, quantity, _, here, _ in rows(results) if here != "-"}


def test_transfer_sets_and_corpora_are_told_apart() -> None:
    """KD on a ninth of the reviews, or on other reviews, would be taken for KD on all of them."""
    books = {"task": "book_reviews"}
    results = [run("kd", BASE, 80, **books, teacher_score=0.9)]
    for size, score in ((213, 85), (1700, 88)):
        sized = {"name": "amazon_books", "size": size}
        results.append(run("kd", BASE, score, **books, transfer=sized, teacher_score=0.9))
    results.append(run("kd", MINI, 70, **books, transfer={"name": "wiki_paragraphs", "size": 1700}))
    results += [run("basic", MINI, 74, **books), run("pf", BASE, 83, **books)]
    assert of_text(results) == {
        "Section 6.2 book_reviews: kd minus pf, transfer amazon_books": "1.0",
        "Section 6.2 book_reviews: teacher minus kd, 12/768, transfer amazon_books, transfer_share 0.125": "5.0",
        "Section 6.2 book_reviews: basic minus kd, 4/256, transfer wiki_paragraphs": "4.0",
    }
    on_transfer = "distill-run method=pd corpus=transfer transfer=nli_star"
    same_text = [run("pd", TINY, 70, command=on_transfer), run("pf", TINY, 67, command=on_transfer)]
    assert of_text([*same_text, run("pf", TINY, 50)]) == {
        "Section 6.3 mnli: pd minus pf, transfer nli_star, corpus transfer": "3.0"
    }


def test_every_derived_number_of_the_paper_can_be_computed() -> None:
    """A cell with a misspelled method would have a dash for ever."""
    methods = ("basic", "kd", "pf", "pd", "pdf", "pd_embeddings", "pd_truncated")
    for cell in derived_cells():
        named = cell.variant.get("transfer", "nli_star")
        size = (cell.num_layers, cell.width) if cell.num_layers and cell.width else TINY
        sizes = [213, 1700] if "transfer_share" in cell.variant else [1700]
        command = f"distill-run corpus={cell.variant.get('corpus', 'books_wiki')}"
        results = [
            run(
                method,
                size,
                50 + 3 * number,
                task=str(cell.task),
                command=command,
                transfer=None if method in ("basic", "pf") else {"name": named, "size": transfer_size},
            )
            for number, method in enumerate(methods)
            for transfer_size in sizes
        ]
        assert value(cell, results) is not None, cell
