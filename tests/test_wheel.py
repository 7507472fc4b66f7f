"""The package as a user gets it: complete, without duplicates, and working far away from the checkout."""

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
from collections import Counter
from collections.abc import Iterator
from email import message_from_bytes
from email.message import Message
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.slow


def files_below(folder: Path) -> Iterator[str]:
    """Names, relative to `folder`, of the files that belong into the package."""
    for path in folder.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            yield path.relative_to(folder).as_posix()


def build(out: Path, *options: str) -> Path:
    """Build with the installed hatchling, hence offline, and return the wheel."""
    command = [sys.executable, "-m", "build", "--no-isolation", *options, "--outdir", str(out), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = out.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("wheel"), "--wheel")


def members(wheel: Path) -> Counter[str]:
    with ZipFile(wheel) as archive:
        return Counter(name for name in archive.namelist() if ".dist-info/" not in name)


def test_wheel_holds_every_file_once(wheel: Path) -> None:
    conf = {name for name in files_below(ROOT / "conf") if not name.startswith("sweep/")}
    expected = {f"distill_runner/{name}" for name in files_below(ROOT / "src" / "distill_runner")}
    expected |= {f"hydra_plugins/{name}" for name in files_below(ROOT / "src" / "hydra_plugins")}
    expected |= {f"distill_runner/conf/{name}" for name in conf}
    expected |= {f"distill_runner/conf/sweep/{name}" for name in files_below(ROOT / "sweeps")}
    assert "distill_runner/conf/config.yaml" in expected
    assert members(wheel) == Counter(expected)


def test_wheel_by_way_of_the_source_distribution_is_the_same(wheel: Path, tmp_path: Path) -> None:
    assert members(build(tmp_path)) == members(wheel)
    (source,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    expected = {f"examples/{name}" for name in files_below(ROOT / "examples")}
    expected |= {name.name for name in ROOT.glob("*.md")} | {"CITATION.cff", "LICENSE", "constraints.txt", "Makefile"}
    expected.add("hatch_build.py")
    assert expected <= names, sorted(expected - names)


def test_a_wheel_with_addresses_has_them_in_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Built by way of the source distribution, which keeps them."""
    monkeypatch.setenv("DISTILL_RUN_URL", "https://host.example/someone/distill-run/")
    package = metadata(build(tmp_path))
    addresses = dict(address.split(", ") for address in package.get_all("Project-URL", []))
    assert addresses["Repository"] == "https://host.example/someone/distill-run"
    assert f"(https://host.example/someone/distill-run/blob/v{package['Version']}/docs/methods.md)" in str(package)
    assert relative_links(str(package.get_payload())) == []


def test_readme_of_a_wheel_has_no_links_that_lead_nowhere(wheel: Path) -> None:
    package = metadata(wheel)
    assert package["Description-Content-Type"] == "text/markdown"
    text = str(package.get_payload())
    assert text.startswith("# distill-run\n")
    assert relative_links(text) == []
    assert package.get_all("Project-URL", []) == []


def metadata(wheel: Path) -> Message:
    with ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return message_from_bytes(archive.read(name))


def relative_links(text: str) -> list[str]:
    return [target for target in re.findall(r"\]\(([^)]*)\)", text) if not target.startswith("https://")]


def test_installed_command_works_outside_the_checkout(tmp_path: Path) -> None:
    """The first block of README, offline: installing, and the demo, of which the plan is printed here."""
    block, *_ = re.findall(r"^```sh\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    installed, demo = (line.partition("#")[0].split() for line in block.splitlines())
    assert installed == ["pip", "install", "."]
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    # The dependencies of the environment that runs this test. A folder named in a .pth file is not itself
    # searched for .pth files, so an editable install of the checkout stays invisible.
    (site_packages,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (site_packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    offline = ("--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--ignore-installed")
    subprocess.run([*pip, "install", *offline, "."], check=True, cwd=ROOT)

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    hidden = ("PYTHONPATH", "DISTILL_DATA_DIR", "DISTILL_STORE_DIR")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}

    def run(*command: str) -> str:
        done = subprocess.run(command, cwd=elsewhere, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    package = run(str(python), "-c", "import distill_runner; print(distill_runner.__file__)")
    assert Path(package.strip()).is_relative_to(site_packages)

    command = str(python.with_name(demo[0]))
    text = run(command, "--help")
    groups = {path.name for path in (ROOT / "conf").iterdir() if path.is_dir()} - {"hydra"}
    assert {"task", "method", "sweep"} <= groups
    assert [group for group in sorted(groups) if group not in text] == []
    assert list(elsewhere.iterdir()) == []  # asking for help leaves nothing behind
    assert "points" in run(command, *demo[1:], "plan=true")
