"""What a worker says on its metrics port, seen from another process."""

from __future__ import annotations

import urllib.error
import urllib.request

from prometheus_client.parser import text_string_to_metric_families


def get(port: int, path: str) -> tuple[int, str]:
    """Status and body; 0 while nobody listens."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
    except OSError:
        return 0, ""


def total(page: str, name: str, **labels: str) -> float:
    """The sum of the samples of this name whose labels include these; parses the whole page."""
    families = text_string_to_metric_families(page)
    samples = [s for family in families for s in family.samples if s.name == f"edgellm_{name}"]
    return sum(s.value for s in samples if labels.items() <= s.labels.items())
