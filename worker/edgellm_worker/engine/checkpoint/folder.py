"""A checkpoint folder as Hugging Face lays it out: which files hold the tensors, and what lies beside them.

Shards are those that `model.safetensors.index.json` names, else `model.safetensors`, else every `*.safetensors` there
is. A name in the index must be a plain file name of this folder: a checkpoint never reaches outside of it. Symbolic
links *are* followed: the Hugging Face cache is made of them, and who can place a link can place the file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from edgellm_worker.engine.checkpoint.jsonfile import JsonObject, read_json_object
from edgellm_worker.engine.checkpoint.problems import WHOLE_FOLDER, ProblemLog
from edgellm_worker.engine.checkpoint.shard import Shard, TensorEntry, open_shard, tensor_map

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
QUANT_CONFIG = "hf_quant_config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
MAX_SHARDS = 4096

_NUMBERED = re.compile(r"-(\d{5})-of-(\d{5})\.safetensors\Z")


@dataclass(frozen=True, slots=True)
class Folder:
    """What was read.

    config        None: not there or unreadable, which is reported
    quant_config  None: the file is not there
    unreadable    tensors known to exist that cannot be used; why is in the problems already
    notes         remarks that are no problems
    """

    path: Path
    config: JsonObject | None
    generation_config: JsonObject
    quant_config: JsonObject | None
    shards: dict[str, Shard]
    tensors: dict[str, TensorEntry]
    unreadable: frozenset[str]
    tokenizer_files: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def tensor_file(self) -> str:
        """Where a tensor that is nowhere ought to be named."""
        return INDEX if _exists(self.path, INDEX) else next(iter(self.shards), SINGLE)

    @property
    def size_bytes(self) -> int:
        return sum(shard.size_bytes for shard in self.shards.values())


def open_folder(path: Path, problems: ProblemLog) -> Folder | None:
    """Read headers and configs. None only if `path` is no folder; otherwise whatever could be read."""
    if not path.is_dir():
        problems.add(WHOLE_FOLDER, "no such checkpoint folder")
        return None
    notes: list[str] = []
    config = read_json_object(path, CONFIG, problems)
    weight_map = _weight_map(path, problems) if _exists(path, INDEX) else None
    files = _shard_files(path, weight_map, problems, notes)
    opened = ((file, open_shard(path, file, problems)) for file in files)
    shards = {file: shard for file, shard in opened if shard is not None}
    tensors = tensor_map(shards, problems)
    unreadable = {name for shard in shards.values() for name in shard.refused}
    if weight_map is not None:
        unreadable |= {name for name, file in weight_map.items() if file not in shards}
        _check_index(weight_map, shards, tensors, problems)
    return Folder(
        path=path,
        config=config,
        generation_config=_optional(path, GENERATION_CONFIG, problems) or {},
        quant_config=_optional(path, QUANT_CONFIG, problems),
        shards=shards,
        tensors=tensors,
        unreadable=frozenset(unreadable),
        tokenizer_files=tuple(file for file in TOKENIZER_FILES if (path / file).is_file()),
        notes=tuple(notes),
    )


def _exists(path: Path, file: str) -> bool:
    return (path / file).is_symlink() or (path / file).exists()


def _optional(path: Path, file: str, problems: ProblemLog) -> JsonObject | None:
    return read_json_object(path, file, problems) if _exists(path, file) else None


def _weight_map(path: Path, problems: ProblemLog) -> dict[str, str]:
    """Tensor name -> file name, with the names that leave the folder refused."""
    index = read_json_object(path, INDEX, problems) or {}
    raw = index.get("weight_map")
    if not isinstance(raw, dict):
        problems.add(INDEX, "must map tensor names to file names", tensor="weight_map")
        return {}
    result = {}
    for name, file in raw.items():
        if isinstance(file, str) and _is_plain_name(file):
            result[name] = file
        else:
            problems.add(INDEX, f"{file!r} is no file name of this folder", tensor=name)
    return result


def _is_plain_name(file: str) -> bool:
    is_name = file == Path(file).name and "\\" not in file and "\0" not in file
    return is_name and file.endswith(".safetensors") and len(file) <= 255


def _shard_files(
    path: Path, weight_map: dict[str, str] | None, problems: ProblemLog, notes: list[str]
) -> Iterable[str]:
    present = sorted(file.name for file in path.glob("*.safetensors"))
    if weight_map is not None:
        named = sorted(set(weight_map.values()))
        unnamed = [file for file in present if file not in set(named)]
        if unnamed:
            notes.append(f"{INDEX} does not name {', '.join(unnamed)}: not read")
        files = named
    elif SINGLE in present:
        if len(present) > 1:
            others = ", ".join(file for file in present if file != SINGLE)
            notes.append(f"{SINGLE} is read; {others} beside it: not read (no {INDEX} names them)")
        files = [SINGLE]
    else:
        _check_numbering(present, problems)
        files = present
    if not files:
        problems.add(WHOLE_FOLDER, "no safetensors file (other weight formats are not read)")
    if len(files) > MAX_SHARDS:
        problems.add(WHOLE_FOLDER, f"{len(files)} shards; at most {MAX_SHARDS} are read")
    return files[:MAX_SHARDS]


def _check_numbering(present: list[str], problems: ProblemLog) -> None:
    """Without an index the file names themselves say how many shards there are."""
    for file in present:
        match = _NUMBERED.search(file)
        if match is None or int(match[2]) > MAX_SHARDS:
            continue
        stem = file[: match.start()]
        total = match[2]
        wanted = [f"{stem}-{number:05d}-of-{total}.safetensors" for number in range(1, int(total) + 1)]
        for missing in sorted(set(wanted) - set(present)):
            problems.add(missing, f"missing shard: {file} counts {int(total)}")
        return


def _check_index(
    weight_map: dict[str, str], shards: dict[str, Shard], tensors: dict[str, TensorEntry], problems: ProblemLog
) -> None:
    """Index and shards must name the same tensors. A shard that could not be opened was reported once already."""
    held = {(entry.file, name) for name, entry in tensors.items()}
    for name, file in weight_map.items():
        if file in shards and (file, name) not in held and name not in shards[file].refused:
            found = f"it is in {tensors[name].file}" if name in tensors else "no shard holds it"
            problems.add(file, f"{INDEX} places it here, but {found}", tensor=name)
    for name, entry in tensors.items():
        if name not in weight_map:
            problems.add(entry.file, f"{INDEX} does not name it", tensor=name)
