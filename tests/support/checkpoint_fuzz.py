"""Mutations of checkpoint folders: bytes of headers, lines of headers, configs, claims and the index.

A case is a function of its number and the seed alone. Whatever it makes, opening it must end in a checkpoint or in a
`CheckpointError` whose problems name a file; and must not take memory out of proportion.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgellm_worker.engine.checkpoint.checkpoint import open_checkpoint
from edgellm_worker.engine.errors import CheckpointError

VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 3, 2**31, 2**63, 2**64, 10**30, 10**400, 0.5, -0.0, 1e308, "", "x", "FP8", "NVFP4", "a\0b", "é" * 40,
    "*", "[", "re:(a+)+$", "re:(?P<", "../../etc/passwd", [], [0], [0, 0], [1, 2, 3], [None], ["*"], [[]], {}, {"a": 1},
    {"quant_algo": "FP8"}, {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "MIXED_PRECISION", "qwen3_5", "llama",
)  # fmt: skip
FILES = ("config.json", "hf_quant_config.json", "model.safetensors.index.json", "generation_config.json")


@dataclass(frozen=True)
class Seed:
    """A sound folder in memory: JSON files, and shards as (header, data)."""

    documents: Mapping[str, Any]
    shards: Mapping[str, tuple[Mapping[str, Any], bytes]]


def read_seed(folder: Path) -> Seed:
    documents = {file: json.loads((folder / file).read_text()) for file in FILES if (folder / file).exists()}
    shards = {}
    for path in folder.glob("*.safetensors"):
        raw = path.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        shards[path.name] = (json.loads(raw[8 : 8 + length]), raw[8 + length :])
    return Seed(documents, shards)


def _spots(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place inside a JSON document."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(spot for key, item in inner for spot in _spots(item, (*path, key)))]


def mutate_json(document: Any, rng: random.Random) -> Any:
    """A copy with one to three places replaced, removed, renamed or repeated."""
    document = json.loads(json.dumps(document))
    for _ in range(rng.choice((1, 1, 2, 3))):
        spots = [spot for spot in _spots(document) if spot]
        if not spots:
            return rng.choice(VALUES)
        *parents, key = rng.choice(spots)
        holder = document
        for step in parents:
            holder = holder[step]
        _MUTATIONS[rng.randrange(len(_MUTATIONS))](holder, key, rng)
    return document


def _replace(holder: Any, key: Any, rng: random.Random) -> None:
    holder[key] = rng.choice(VALUES)


def _remove(holder: Any, key: Any, rng: random.Random) -> None:
    del holder[key]


def _nudge(holder: Any, key: Any, rng: random.Random) -> None:
    """A number near the old one: off-by-one shapes and offsets."""
    value = holder[key]
    is_number = isinstance(value, int) and not isinstance(value, bool)
    holder[key] = value + rng.choice((-16, -1, 1, 2, 16)) if is_number else rng.choice(VALUES)


def _rename(holder: Any, key: Any, rng: random.Random) -> None:
    if isinstance(holder, dict):
        text = str(key)
        cut = rng.randrange(len(text) + 1)
        holder[text[:cut] + rng.choice(("", ".", "mtp.", "weight_scale", "*", "\0")) + text[cut:]] = holder.pop(key)
    else:
        holder.append(holder[key])


def _swap(holder: Any, key: Any, rng: random.Random) -> None:
    keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
    other = rng.choice(keys)
    holder[key], holder[other] = holder[other], holder[key]


_MUTATIONS: tuple[Callable[[Any, Any, random.Random], None], ...] = (_replace, _remove, _nudge, _rename, _swap)


def _flip_bytes(raw: bytes, rng: random.Random, limit: int) -> bytes:
    """Some bytes of the first `limit` changed, or the file cut, or grown."""
    data = bytearray(raw)
    kind = rng.randrange(4)
    if kind == 0:
        return bytes(data[: rng.randrange(len(data) + 1)])
    if kind == 1:
        return bytes(data) + rng.randbytes(rng.randrange(1, 64))
    for _ in range(rng.choice((1, 2, 8))):
        data[rng.randrange(min(limit, len(data)))] = rng.randrange(256)
    return bytes(data)


def mutate(seed: Seed, rng: random.Random) -> tuple[str, bytes]:
    """One file of the folder and its new contents; shards are hit most."""
    file = rng.choice([*seed.documents, *seed.shards, *seed.shards, *seed.shards])
    as_bytes = rng.random() < 0.4
    if file in seed.documents:
        document = seed.documents[file]
        raw = json.dumps(document if as_bytes else mutate_json(document, rng)).encode()
        return file, _flip_bytes(raw, rng, len(raw)) if as_bytes else raw
    header, data = seed.shards[file]
    text = json.dumps(header if as_bytes else mutate_json(header, rng)).encode()
    raw = len(text).to_bytes(8, "little") + text + data
    return file, _flip_bytes(raw, rng, 8 + len(text)) if as_bytes else raw


def run_cases(seed_folders: list[Path], numbers: range, seed: int) -> dict[str, int]:
    """Opens every case; raises what is no `CheckpointError`, told with the number that makes it again. The folders are
    used in place: one file is changed, and put back.
    """
    seeds = [read_seed(path) for path in seed_folders]
    counts = {"opened": 0, "refused": 0, "problems": 0}
    for number in numbers:
        rng = random.Random(f"{seed}:{number}")
        place = seed_folders[number % len(seeds)]
        what, changed = mutate(seeds[number % len(seeds)], rng)
        sound = (place / what).read_bytes()
        (place / what).write_bytes(changed)
        try:
            open_checkpoint(place)
        except CheckpointError as error:
            counts["refused"] += 1
            counts["problems"] += len(error.problems)
            if not error.problems or not all(problem.startswith(f"{place}: ") for problem in error.problems):
                raise AssertionError(f"seed {seed} case {number} ({what}): {error.problems}") from error
        except Exception as error:
            raise AssertionError(f"seed {seed} case {number} ({what}): {type(error).__name__}: {error}") from error
        else:
            counts["opened"] += 1
        finally:
            (place / what).write_bytes(sound)
    return counts
