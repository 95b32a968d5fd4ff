"""The safetensors header: every way in which it can be wrong is named with file and tensor, all of them at once."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from edgellm_worker.engine.checkpoint.problems import MAX_PER_FILE, ProblemLog
from edgellm_worker.engine.checkpoint.shard import MAX_HEADER_BYTES, open_shard
from tests.support.checkpoint_files import header_bytes

FILE = "model.safetensors"


def f32(begin, end, shape=None):
    return {"dtype": "F32", "shape": [(end - begin) // 4] if shape is None else shape, "data_offsets": [begin, end]}


def problems_of(tmp_path, content: bytes) -> list[str]:
    (tmp_path / FILE).write_bytes(content)
    log = ProblemLog()
    open_shard(tmp_path, FILE, log)
    return [str(problem) for problem in log.problems]


def header_problems(tmp_path, header, num_data_bytes: int) -> list[str]:
    return problems_of(tmp_path, header_bytes(header) + bytes(num_data_bytes))


def test_what_the_safetensors_library_wrote_is_read_the_same(tmp_path):
    rng = np.random.default_rng(0)
    tensors = {
        "a": rng.standard_normal((3, 5)).astype(np.float32),
        "b": rng.standard_normal((7,)).astype(np.float16),
        "scalar": np.array(2.5, np.float32),
        "empty": np.zeros((0, 4), np.float32),
        "bytes": rng.integers(0, 255, (9,)).astype(np.uint8),
        "bf": rng.standard_normal((2, 3)).astype(ml_dtypes.bfloat16),
    }
    save_file(tensors, tmp_path / FILE, metadata={"format": "np"})
    log = ProblemLog()
    shard = open_shard(tmp_path, FILE, log)
    assert not log
    loaded = load_file(tmp_path / FILE)
    assert {entry.name for entry in shard.entries} == loaded.keys()
    for entry in shard.entries:
        array = shard.array(entry)
        assert array.dtype == loaded[entry.name].dtype
        assert array.shape == loaded[entry.name].shape
        assert array.tobytes() == loaded[entry.name].tobytes()
        assert not array.flags.writeable or array.size == 0


@pytest.mark.parametrize("size", [0, 5])
def test_a_file_too_short_for_a_header(tmp_path, size):
    assert problems_of(tmp_path, bytes(size)) == [f"{FILE}: {size} bytes: too short for a safetensors header"]


def test_a_header_longer_than_the_file(tmp_path):
    (problem,) = problems_of(tmp_path, (1000).to_bytes(8, "little") + b"{}")
    assert problem == f"{FILE}: header of 1000 bytes is longer than the file (10 bytes)"


def test_a_header_of_absurd_length_is_not_read(tmp_path):
    path = tmp_path / FILE
    with path.open("wb") as stream:
        stream.write((2**40).to_bytes(8, "little"))
        stream.truncate(2**41)  # sparse
    log = ProblemLog()
    assert open_shard(tmp_path, FILE, log) is None
    assert str(log.problems[0]) == f"{FILE}: header of {2**40} bytes; at most {MAX_HEADER_BYTES} are read"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"[]", "holds a JSON list, not an object"),
        (b"\xff\xfe", "not UTF-8 at byte 0"),
        (b'{"a": 1', "bad JSON"),
        (b'{"a": NaN}', "NaN is no JSON number"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "bad JSON"),
    ],
)
def test_a_header_that_is_no_json_object(tmp_path, text, reason):
    (problem,) = problems_of(tmp_path, len(text).to_bytes(8, "little") + text)
    assert problem.startswith(f"{FILE}: ")
    assert reason in problem


def test_a_tensor_named_twice_in_one_header(tmp_path):
    line = json.dumps(f32(0, 4))
    text = f'{{"a": {line}, "a": {line}}}'.encode()
    (problem,) = problems_of(tmp_path, len(text).to_bytes(8, "little") + text + bytes(4))
    assert problem == f"{FILE}: bad JSON: the key 'a' appears twice"


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({"dtype": "F32", "shape": [1]}, "must hold dtype, shape and data_offsets"),
        ([1, 2], "must hold dtype, shape and data_offsets"),
        ({**f32(0, 4), "dtype": "F128"}, "unknown dtype 'F128'"),
        ({**f32(0, 4), "dtype": ["F32"]}, "unknown dtype ['F32']"),
        ({**f32(0, 4), "shape": [-1]}, "bad shape [-1]"),
        ({**f32(0, 4), "shape": [True]}, "bad shape [True]"),
        ({**f32(0, 4), "shape": [1.0]}, "bad shape [1.0]"),
        ({**f32(0, 4), "shape": [1] * 9}, "bad shape"),
        ({**f32(0, 4), "data_offsets": [4, 0]}, "bad data_offsets [4, 0]"),
        ({**f32(0, 4), "data_offsets": [0]}, "bad data_offsets [0]"),
        ({**f32(0, 4), "shape": [2]}, "F32 [2] takes 8 bytes, data_offsets span 4"),
        ({**f32(0, 4), "shape": [2**62, 2**62]}, "takes"),
        (f32(0, 2**40), "truncated: ends at byte"),
    ],
)
def test_a_wrong_entry_is_named_and_the_others_are_kept(tmp_path, entry, reason):
    content = header_bytes({"bad": entry, "good": f32(0, 4)}) + bytes(4)
    (tmp_path / FILE).write_bytes(content)
    log = ProblemLog()
    shard = open_shard(tmp_path, FILE, log)
    assert [kept.name for kept in shard.entries] == ["good"]
    assert shard.refused == {"bad"}
    (problem,) = map(str, log.problems)
    assert problem.startswith(f"{FILE}: bad: ")
    assert reason in problem


def test_overlapping_offsets(tmp_path):
    header = {"a": f32(0, 8), "b": f32(4, 12), "c": f32(12, 16)}
    assert header_problems(tmp_path, header, 16) == [f"{FILE}: b: overlaps a by 4 bytes"]


def test_a_tensor_inside_another(tmp_path):
    header = {"a": f32(0, 16), "b": f32(4, 8), "c": f32(8, 12)}
    assert header_problems(tmp_path, header, 16) == [
        f"{FILE}: b: overlaps a by 4 bytes",
        f"{FILE}: c: overlaps a by 4 bytes",
    ]


def test_holes_and_trailing_bytes(tmp_path):
    header = {"a": f32(0, 4), "b": f32(8, 12)}
    assert header_problems(tmp_path, header, 20) == [
        f"{FILE}: b: 4 unused bytes before it",
        f"{FILE}: 8 bytes after the last tensor belong to none",
    ]


def test_a_truncated_file_names_every_tensor_that_is_cut(tmp_path):
    header = {name: f32(i * 4, i * 4 + 4) for i, name in enumerate("abcd")}
    problems = header_problems(tmp_path, header, 6)
    assert [problem.split(":")[1].strip() for problem in problems] == ["b", "c", "d"]
    assert all("truncated" in problem for problem in problems)


def test_metadata_must_be_strings(tmp_path):
    header = {"__metadata__": {"format": 1}, "a": f32(0, 4)}
    assert header_problems(tmp_path, header, 4) == [f"{FILE}: __metadata__: must map strings to strings"]


def test_a_flood_of_problems_is_counted_not_listed(tmp_path):
    header = {f"t{i}": {**f32(0, 4), "dtype": "?"} for i in range(MAX_PER_FILE + 50)}
    problems = header_problems(tmp_path, header, 4)
    assert len(problems) == MAX_PER_FILE + 1
    assert problems[-1] == f"{FILE}: and 50 more problems in this file"


@pytest.mark.parametrize("make", ["directory", "dangling", "fifo"])
def test_what_is_no_regular_file_is_a_missing_shard(tmp_path, make):
    import os

    path = tmp_path / FILE
    if make == "directory":
        path.mkdir()
    elif make == "dangling":
        path.symlink_to(tmp_path / "nowhere")
    else:
        os.mkfifo(path)
    log = ProblemLog()
    assert open_shard(tmp_path, FILE, log) is None
    assert [str(problem) for problem in log.problems] == [f"{FILE}: missing shard: no such file"]
