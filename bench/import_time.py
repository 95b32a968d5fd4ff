"""How long `import edgellm_producer` takes beside its own dependencies, from a wheel in an empty environment.

    python bench/import_time.py [--runs 15] [--json]

Both imports are timed in fresh interpreters, in turn, so that both meet the same machine; the best of all runs counts.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
TIMED = "import time; start = time.perf_counter(); {statement}; print(time.perf_counter() - start)"
OURS = "import edgellm_producer"
BASE = "import redis.asyncio, msgpack, pydantic"
FOREIGN = ("numpy", "tensorrt", "edgellm_worker", "prometheus_client")


def installed_wheel(folder: Path) -> Path:
    """The python of a new environment that holds the built wheel and its base dependencies only."""
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT], check=True
    )
    (wheel,) = folder.glob("*.whl")
    venv.create(folder / "env", with_pip=True)
    python = folder / "env" / "bin" / "python"
    subprocess.run(
        [
            python,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "-c",
            ROOT / "constraints.txt",
            wheel,
        ],
        check=True,
    )
    return python


def seconds(python: Path, statement: str) -> float:
    command = [python, "-I", "-c", TIMED.format(statement=statement)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def pulled_in(python: Path) -> list[str]:
    listing = f"{OURS}; import sys; print(*[m for m in {FOREIGN!r} if m in sys.modules])"
    return subprocess.run([python, "-I", "-c", listing], check=True, capture_output=True, text=True).stdout.split()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        python = installed_wheel(Path(folder))
        times: dict[str, list[float]] = {OURS: [], BASE: []}
        for _ in range(options.runs):
            for statement, values in times.items():
                values.append(seconds(python, statement))
        ours, base = min(times[OURS]), min(times[BASE])
        result = {
            "import_ms": round(ours * 1e3, 1),
            "dependencies_ms": round(base * 1e3, 1),
            "ratio": round(ours / base, 3),
            "pulled_in": pulled_in(python),
        }
    if options.json:
        print(json.dumps(result))
    else:
        print(f"{OURS}: {result['import_ms']} ms")
        print(f"{BASE}: {result['dependencies_ms']} ms")
        print(f"ratio {result['ratio']} (at most 1.3), pulled in: {result['pulled_in'] or 'nothing foreign'}")
    return int(ours / base > 1.3 or bool(result["pulled_in"]))


if __name__ == "__main__":
    sys.exit(main())
