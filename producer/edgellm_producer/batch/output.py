"""The output file and its journal: what makes a run resumable."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final, Self

from edgellm_producer.batch.lines import answered_by

_FINGERPRINT_BYTES: Final = 1 << 16
_SYNC_INTERVAL_S: Final = 1.0


class BatchFileError(Exception):
    """The files do not fit together; the message says what to do."""


def journal_path(output: Path) -> Path:
    return output.with_name(output.name + ".journal")


def fingerprint(source: Path) -> str:
    """Tells one input file from another: its size and beginning."""
    with source.open("rb") as file:
        return f"{source.stat().st_size}:{hashlib.sha256(file.read(_FINGERPRINT_BYTES)).hexdigest()}"


@dataclass(slots=True)
class BatchOutput:
    """Appends whole lines. `answered` holds the line numbers found in the file when it was opened, `failures` how many
    of them failed, by the error's code.
    """

    run_id: str
    file: IO[bytes]
    answered: frozenset[int] = frozenset()
    failures: Counter[str] = field(default_factory=Counter)
    is_durable: bool = True
    _last_sync: float = field(default_factory=time.monotonic)

    @classmethod
    @contextmanager
    def open(cls, output: Path, source: Path | None) -> Iterator[Self]:
        """Start or resume. The journal is removed by `complete`, not by leaving the context."""
        journal = journal_path(output)
        mark = fingerprint(source) if source is not None else "stdin"
        if journal.exists():
            run_id = _resumed_run(journal, mark)
            answered, failures = _recover(output, run_id)
        elif output.exists() and output.stat().st_size:
            raise BatchFileError(f"{output} exists and no journal says that it is unfinished: move it away first")
        else:
            run_id, answered, failures = f"batch-{secrets.token_hex(8)}", frozenset[int](), Counter[str]()
            _write_durably(journal, json.dumps({"run": run_id, "input": mark}).encode())
        with output.open("ab") as file:
            yield cls(run_id, file, answered, failures)
            file.flush()
            os.fsync(file.fileno())

    def write(self, line: bytes) -> None:
        """One line, in one write; synced to the disk about once a second."""
        self.file.write(line)
        self.file.flush()
        if self.is_durable and time.monotonic() - self._last_sync > _SYNC_INTERVAL_S:
            os.fsync(self.file.fileno())
            self._last_sync = time.monotonic()


def complete(output: Path) -> None:
    """Every line is answered: nothing is left to resume."""
    journal_path(output).unlink(missing_ok=True)


def _resumed_run(journal: Path, mark: str) -> str:
    try:
        fields = json.loads(journal.read_bytes())
        run_id, seen = str(fields["run"]), fields["input"]
    except (ValueError, KeyError, TypeError) as error:
        raise BatchFileError(f"{journal} is damaged: remove it and the output to start over") from error
    if mark == "stdin" or seen != mark:
        raise BatchFileError(f"{journal} belongs to a run over another input: finish that one or remove it")
    return run_id


def _recover(output: Path, run_id: str) -> tuple[frozenset[int], Counter[str]]:
    """Line numbers already answered, and the codes of those that failed; a last line without its newline is cut off."""
    if not output.exists():
        return frozenset(), Counter()
    answered, failures, whole_bytes = set[int](), Counter[str](), 0
    with output.open("rb") as file:
        for number, text in enumerate(file, 1):
            if not text.endswith(b"\n"):
                break
            try:
                line, code = answered_by(run_id, text)
            except (ValueError, KeyError, TypeError) as error:
                raise BatchFileError(f"{output}:{number}: {error}: move the file away to start over") from error
            answered.add(line)
            failures.update([] if code is None else [code])
            whole_bytes += len(text)
    os.truncate(output, whole_bytes)
    return frozenset(answered), failures


def _write_durably(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
