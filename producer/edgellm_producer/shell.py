"""What both command lines do alike towards the shell that started them."""

from __future__ import annotations

import math
import os
import sys
from argparse import ArgumentTypeError
from errno import ENOENT
from pathlib import Path


def leave_to_nobody() -> None:
    """Standard output's reader has left (`edgellm-worker inspect MODEL | head`): what is still buffered goes nowhere,
    instead of failing once more when the interpreter closes the file.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def flush() -> None:
    """What cannot be written is an error of the command, not a remark at the interpreter's end."""
    if sys.stdout is not None:  # closed by the shell: `>&-`
        sys.stdout.flush()


def at_least_one(text: str) -> int:
    """As argparse's `type`."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} is no number from 1")
    return int(text)


def seconds(text: str) -> float:
    """As argparse's `type`: 0 or more, and an end."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise ArgumentTypeError(f"{text!r} is no number of seconds")
    return value


def expanded(path: Path) -> Path:
    """`~` and `~user`. Raises `OSError` where there is no such home."""
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise OSError(ENOENT, "there is no such home directory", str(path)) from error


def warn(text: str) -> None:
    sys.stderr.write(f"edgellm-producer: {text}\n")
    sys.stderr.flush()


def explained(error: Exception) -> str:
    """A fault in words: of a file, its name and why, without the number that only a programmer knows."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)
