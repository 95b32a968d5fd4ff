"""JSON of a checkpoint folder, read strictly: bounded in size, no duplicate keys, no NaN, an object at the top."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from edgellm_worker.engine.checkpoint.problems import ProblemLog

# A config of the largest supported model is 90 KB; parsed JSON takes up to 25 times its text in memory.
MAX_JSON_BYTES = 8 * 2**20

JsonObject = dict[str, Any]


class _BadJsonError(ValueError):
    pass


def _unique(pairs: list[tuple[str, Any]]) -> JsonObject:
    result = dict(pairs)
    if len(result) != len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise _BadJsonError(f"the key {twice!r} appears twice")
    return result


def _refuse_constant(text: str) -> Any:
    raise _BadJsonError(f"{text} is no JSON number")


def parse_json_object(data: bytes, file: str, problems: ProblemLog) -> JsonObject | None:
    """The object in `data`, or None with the reason in `problems`."""
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        problems.add(file, f"not UTF-8 at byte {error.start}")
    except RecursionError:
        problems.add(file, "nested too deeply")
    except ValueError as error:  # JSONDecodeError, _BadJsonError, and integers with thousands of digits
        problems.add(file, f"bad JSON: {error}")
    else:
        if isinstance(value, dict):
            return value
        problems.add(file, f"holds a JSON {type(value).__name__}, not an object")
    return None


def read_json_object(folder: Path, file: str, problems: ProblemLog) -> JsonObject | None:
    """The object in `folder/file`, or None with the reason in `problems`. A file that is not there is a problem too."""
    path = folder / file
    try:
        if not path.is_file():
            problems.add(file, "no such file")
            return None
        size_bytes = path.stat().st_size
        if size_bytes > MAX_JSON_BYTES:
            problems.add(file, f"{size_bytes} bytes of JSON; at most {MAX_JSON_BYTES} are read")
            return None
        data = path.read_bytes()
    except OSError as error:
        problems.add(file, f"cannot be read: {error.strerror}")
        return None
    return parse_json_object(data, file, problems)
