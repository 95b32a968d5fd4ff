"""The built wheel: what it carries, and what importing the producer from it pulls in."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("wheel")

ROOT = Path(__file__).parents[2]
DATA = "edgellm_worker/data/tiny-qwen3.5-mtp"


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", folder],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="session")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def test_wheel_carries_the_checkpoint_scripts_and_types(wheel: Path):
    names = set(zipfile.ZipFile(wheel).namelist())
    for name in ("model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja", "README.md"):
        assert f"{DATA}/{name}" in names
    assert {"edgellm_worker/py.typed", "edgellm_producer/py.typed"} <= names
    sources = {p.relative_to(ROOT / "producer") for p in (ROOT / "producer").rglob("*.lua")}
    sources |= {p.relative_to(ROOT / "worker") for p in (ROOT / "worker").rglob("*.lua")}
    assert {str(path) for path in sources} <= names
    assert not [name for name in names if name.startswith(("tests/", "grafana/", "bench/", "docs/"))]


def base_requirements() -> list[str]:
    """Distribution names of the base install and all that they need, as they are installed here."""
    todo, seen = ["redis", "hiredis", "msgpack", "pydantic"], set()
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        for requirement in importlib.metadata.requires(name) or []:
            needed = re.match(r"[A-Za-z0-9._-]+", requirement)
            if needed and "extra ==" not in requirement and _is_installed(needed.group()):
                todo.append(needed.group())
    return sorted(seen)


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def link_base_packages(folder: Path) -> None:
    """Only the base install's packages, as in an environment that has nothing else."""
    for name in base_requirements():
        distribution = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or [] if not file.parts[0].startswith("..")}:
            target = Path(str(distribution.locate_file(top)))
            if not (folder / top).exists() and target.exists():
                (folder / top).symlink_to(target)


def test_the_producer_needs_its_base_dependencies_and_nothing_more(unpacked: Path, tmp_path: Path):
    link_base_packages(tmp_path)
    code = (
        f"import sys; sys.path[:0] = [{str(unpacked)!r}, {str(tmp_path)!r}]\n"
        "import edgellm_producer, edgellm_producer.wire\n"
        f"assert edgellm_producer.__file__.startswith({str(unpacked)!r})\n"
        "foreign = {'numpy', 'tensorrt', 'edgellm_worker', 'prometheus_client', 'rich'} & sys.modules.keys()\n"
        "assert not foreign, foreign\n"
        "try:\n    import numpy\nexcept ImportError:\n    print('alone')\n"
    )
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "alone\n"), done.stderr


@pytest.mark.soak
def test_pip_installs_the_wheel_and_its_demo_runs(wheel: Path, tmp_path: Path):
    venv.create(tmp_path / "env", with_pip=True)
    pip = [tmp_path / "env/bin/python", "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt"]
    subprocess.run([*pip, f"{wheel}[worker]"], check=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [tmp_path / "env/bin/edgellm-worker", "demo", "--json"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert '"mean_batch_size"' in done.stdout
