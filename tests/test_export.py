"""A finished run's student as ONNX: files, outputs, table and card."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from distill_runner.commands.parser import run_subcommand
from distill_runner.common.errors import UserError
from distill_runner.datasets.splits import TokenSplit
from distill_runner.deploy.folder import ModelFolder
from distill_runner.deploy.measure import PaddedSplit, running_costs
from distill_runner.deploy.onnx import quantize
from distill_runner.deploy.serving import HEADING, with_section
from distill_runner.models.build import load_model
from distill_runner.report.card import with_license
from helpers.command import distill_run

pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tiny_task_folder: Path, tiny_bert_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run on the tiny task."""
    folder = tmp_path_factory.mktemp("export")
    inputs = ["task=custom", f"task.dataset={tiny_task_folder}", "task.columns=[sentence1,sentence2]"]
    inputs += ["task.max_length=48", f"teacher.source={tiny_bert_folder}", "teacher.optim.epochs=1"]
    inputs += ["student.num_layers=2", "optim.epochs=1", "runtime.device=cpu", "method=rkd"]
    ended = distill_run(folder, *inputs)
    assert ended.code == 0, ended.err
    (run,) = (folder / "outputs" / "runs").iterdir()
    return run


@pytest.fixture(scope="module")
def exported(run: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(run.parents[2])
        run_subcommand("export", [str(run), "--examples", "20"])
    return run


def test_the_files_are_where_the_hub_expects_them(exported: Path) -> None:
    plain, int8 = sorted(file.name for file in (exported / "model" / "onnx").iterdir())
    assert plain == "model.onnx"
    assert int8.startswith(("model_qint8_", "model_quint8_"))


def test_each_output_of_a_matrix_has_a_scale_of_its_own_in_int8(tmp_path: Path) -> None:
    """With one scale, the small weights of the first output would be rounded to 0."""
    import onnx
    from onnx import helper, numpy_helper
    from onnxruntime import InferenceSession

    weights = np.stack([np.linspace(-0.001, 0.001, 64), np.linspace(-1, 1, 64)], axis=1).astype(np.float32)
    ports = [
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["n", size]) for name, size in (("x", 64), ("y", 2))
    ]
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    graph = helper.make_graph([node], "g", ports[:1], ports[1:], [numpy_helper.from_array(weights, "w")])
    plain = tmp_path / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), plain)
    outputs = [InferenceSession(path).run(None, {"x": weights[:, 1:].T.copy()})[0] for path in (plain, quantize(plain))]
    np.testing.assert_allclose(outputs[1], outputs[0], rtol=0.05)


def test_onnx_gives_what_torch_gives_for_any_batch_and_length(exported: Path, tiny_task_folder: Path) -> None:
    import onnxruntime
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(exported / "model")
    model = AutoModelForSequenceClassification.from_pretrained(exported / "model").eval()
    session = onnxruntime.InferenceSession(exported / "model" / "onnx" / "model.onnx")
    for texts in (["the river"], ["a stone", "the green garden under a bright cloud " * 3, "over"]):
        inputs = tokenizer(texts, texts, padding=True, return_tensors="np")
        with torch.no_grad():
            expected = model(**{name: torch.from_numpy(values) for name, values in inputs.items()}).logits.numpy()
        np.testing.assert_allclose(session.run(["logits"], dict(inputs))[0], expected, atol=1e-5)


def test_the_table_has_both_models_in_three_forms(exported: Path) -> None:
    rows = json.loads((exported / "deploy.json").read_text())["rows"]
    assert [(row["model"], row["form"]) for row in rows] == [
        (model, form) for model in ("teacher", "student") for form in ("torch", "ONNX", "ONNX int8")
    ]
    assert all(list(row["cost"]["milliseconds"]) == ["50", "95", "99"] for row in rows)
    assert [row["difference"] is None for row in rows] == [True, False, False] * 2
    assert all(row["agreement"] == 1 for row in rows if row["form"] == "ONNX")
    result = json.loads((exported / "result.json").read_text())
    assert rows[3]["score"] == pytest.approx(result["score"])
    assert rows[0]["score"] == pytest.approx(result["teacher_score"])
    assert rows[5]["num_bytes"] < rows[4]["num_bytes"]


def test_the_card_has_the_table_labels_and_licence(exported: Path) -> None:
    card = (exported / "model" / "README.md").read_text()
    assert card.count(HEADING) == 1
    assert "| student | ONNX int8 |" in card
    assert "Labels, in the order of the outputs: no, yes." in card
    assert "License: not given." in card
    assert "License: mit." in with_license(card, "mit")
    front = "---\nlicense: mit\n---\n"
    assert with_license("# A card of somebody else", "mit") == f"{front}\n# A card of somebody else"
    assert with_license("", "mit").startswith(front)


def test_what_a_user_wrote_behind_the_table_stays() -> None:
    first, second = (["one", "```python\npass\n```", "```sh\nls\n```"], ["two"])
    mine = "\nMy words.\n\n## More\n\n```\ncode\n```\n"
    assert with_section(with_section("# A\n", first) + mine, second) == with_section("# A\n", second) + mine


def test_engines_take_turns(tmp_path: Path) -> None:
    lengths = np.arange(1, 41)
    np.save(tmp_path / "offsets.npy", np.concatenate([[0], np.cumsum(lengths)]))
    for name in ("ids", "segments"):
        np.save(tmp_path / f"{name}.npy", np.ones(lengths.sum(), dtype=np.int32))
    tokenizer = SimpleNamespace(model_input_names=["input_ids", "attention_mask"], pad_token_id=7)
    examples = PaddedSplit(TokenSplit(tmp_path), tokenizer)
    called: list[str] = []

    def engine(name: str) -> Any:
        def run(inputs: Any) -> Any:
            called.append(name)
            assert (inputs["input_ids"][inputs["attention_mask"] == 0] == 7).all()
            return inputs["attention_mask"].sum(1, keepdims=True).astype(np.float32)

        return run

    engines = {name: engine(name) for name in "ab"}
    costs = running_costs(engines, dict.fromkeys(engines, examples), 12)
    assert called[:22] == [*"a" * 11, *"b" * 11], "both sizes of batch are warmed up"
    assert called[22:] == [*"ab" * 3 * 6], "six rounds of two examples and a batch"
    assert set(costs) == {"a", "b"}
    assert all(cost.examples_per_second > 0 for cost in costs.values())
    assert all(cost.interval[0] <= cost.milliseconds[50] <= cost.interval[1] for cost in costs.values())
    assert examples.outputs(engines["a"])[:, 0].tolist() == lengths.tolist(), "in the order of the split"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "no labeled examples to score the model on"),
        (["--threads", "0"], "--threads=0: must be between 1 and"),
        (["--examples", "0"], "--examples=0: must be a positive number"),
    ],
)
def test_mistakes_are_told(arguments: list[str], said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said):
        run_subcommand("export", [str(tmp_path), *arguments])


def test_another_folder_is_for_models_without_a_run(run: Path, tiny_task_folder: Path, tmp_path: Path) -> None:
    (data,), file = tiny_task_folder.glob("validation*"), tmp_path / "a.txt"
    file.write_text("mine")
    with pytest.raises(UserError, match="is not read, since the files of a run are in its folder"):
        run_subcommand("export", [str(run), "--out", str(tmp_path)])
    with pytest.raises(UserError, match="is a file\n"):
        run_subcommand("export", [str(run / "model"), "--data", str(data), "--out", str(file)])


def test_a_student_of_images_answers_as_its_folder_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program of its card prepares images as the processor that transformers reads from the folder."""
    from transformers import AutoImageProcessor

    inputs = "task=demo_digits student=resnet8 optim=cifar method=basic optim.max_steps=4 runtime.device=cpu"
    assert not distill_run(tmp_path, *inputs.split(), "task.resize=[24,16]", "task.columns=[image]").code
    (run,) = (tmp_path / "outputs" / "runs").iterdir()
    run_subcommand("export", [str(run), "--examples", "8", "--no-int8"])
    monkeypatch.chdir(run / "model")
    code = re.findall(r"```python\n(.*?)```", Path("README.md").read_text(), re.DOTALL)[-1]
    names = dict[str, Any]()
    exec(code, names)
    image = names["Image"].effect_noise((30, 9), 100)
    pixels = AutoImageProcessor.from_pretrained(".")(image, return_tensors="pt")["pixel_values"]
    network = load_model(run / "model", ModelFolder.read(str(run)).head).eval()
    expected = network(pixel_values=pixels).logits.softmax(-1)[0].detach().numpy()
    np.testing.assert_allclose([*names["predict"]([image])[0].values()], expected, atol=1e-5)
