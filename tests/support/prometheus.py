"""A real Prometheus on this machine, scraping given targets with the project's alert rules."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.support.redis_server import free_port

ROOT = Path(__file__).parents[2]
RULES = ROOT / "grafana" / "prometheus" / "alerts.yml"
START_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Prometheus:
    url: str

    def get(self, path: str, **parameters: str) -> Any:
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}", timeout=10) as response:  # noqa: S310 - our own server
            return json.load(response)["data"]

    def values(self, expr: str) -> list[float]:
        """The instant vector's values, NaN included."""
        return [float(sample["value"][1]) for sample in self.get("query", query=expr)["result"]]

    def num_samples(self, expr: str) -> int:
        return sum(len(series["values"]) for series in self.get("query", query=f"{expr}[10m]")["result"])


@contextmanager
def running_prometheus(targets: Sequence[str], folder: Path) -> Iterator[Prometheus]:
    """`targets` are host:port. Scrapes every second; data is kept in `folder`."""
    shutil.copy(RULES, folder / RULES.name)
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": [RULES.name],
        "scrape_configs": [{"job_name": "edgellm-worker", "static_configs": [{"targets": list(targets)}]}],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    address = f"127.0.0.1:{free_port()}"
    process = subprocess.Popen(
        [
            "prometheus",
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address={address}",
            "--log.level=error",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _await_ready(process, f"http://{address}/-/ready")
        yield Prometheus(f"http://{address}")
    finally:
        process.terminate()
        process.wait(timeout=START_TIMEOUT_S)


def _await_ready(process: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        assert process.poll() is None, "prometheus ended"
        try:
            with urllib.request.urlopen(url, timeout=1):  # noqa: S310 - our own server
                return
        except OSError:
            time.sleep(0.05)
    raise TimeoutError(url)
