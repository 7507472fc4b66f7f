"""Every Python snippet of the documentation runs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from distill_runner import api
from distill_runner.compose.run_config import RunConfig
from helpers.fake_results import result

ROOT = Path(__file__).parents[1]
GENERATED = {"_build", "options"}
"""Folders of ``docs`` that are not in the repository."""
PAGES = [ROOT / "README.md", *sorted(path for path in ROOT.glob("docs/**/*.md") if not GENERATED & {*path.parts})]
SNIPPETS = {
    page.relative_to(ROOT).as_posix(): found
    for page in PAGES
    if (found := re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL))
}
LOADING = ("docs/tutorials/deploy.md", "docs/tokens.md")
"""Pages whose snippets load the model of a run; that for words loads the encoder of any run, with a new head."""
SHORTER = ("stages.pretrain.optim.max_steps=2", "optim.max_steps=2", "teacher.optim.max_steps=2", "runtime.device=cpu")


def test_every_page_with_snippets_is_named_here() -> None:
    assert SNIPPETS.keys() == {"docs/reference/python.md", "docs/wandb.md", *LOADING}


@pytest.mark.slow
def test_the_snippets_run(tmp_path: Path) -> None:
    """Those of the page on Python train small students, which those of the page on deployment load."""
    page = "\n".join(SNIPPETS["docs/reference/python.md"])
    quoted = ", ".join(f'"{override}"' for override in SHORTER)
    page = page.replace('"student.num_layers=2")', f'"student.num_layers=2", {quoted})')
    done = subprocess.run([sys.executable, "-c", page], cwd=tmp_path, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert "('student', False)]" in done.stdout
    assert "stage student: building" in done.stderr, "without a terminal, the log is printed"
    assert (tmp_path / "scores.png").stat().st_size > 5_000
    (run, *_) = (tmp_path / "outputs" / "runs").glob("*-rkd-*")
    for name in LOADING:
        code = "\n".join(SNIPPETS[name]).replace("outputs/runs/<run>", str(run))
        subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=100)


def test_a_job_that_trained_a_teacher_has_no_row() -> None:
    pytest.importorskip("pandas")
    frame = api.frame([result(), result(stage="teacher", score=None)])
    assert len(frame) == 1
    assert frame.score.tolist() == [result()["score"]], "a fraction, as in the result"


def test_the_store_of_the_environment_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stores = list[str]()

    def run_stage(run: RunConfig, *_: object) -> dict[str, str]:
        stores.append(str(run.store.dir))
        return {"status": "planned"}

    monkeypatch.setattr("distill_runner.running.run_stage", run_stage)
    overrides = ("task=custom", "task.dataset=x", "method=rkd")
    api.run(*overrides, outputs=tmp_path)
    monkeypatch.setenv("DISTILL_STORE_DIR", str(tmp_path / "shared"))
    api.run(*overrides, outputs=tmp_path)
    assert stores == [str(tmp_path / "store"), str(tmp_path / "shared")]
