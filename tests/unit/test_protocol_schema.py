"""The JSON Schema that docs/ carries is the models', and it accepts what the models do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import msgpack
import pytest

from edgellm_producer.protocol import schema, schema_text
from edgellm_producer.wire import Delta, Job, Reply

ROOT = Path(__file__).parents[2]


def errors(model: str, message: Any) -> list[str]:
    document = {**schema(), "anyOf": [{"$ref": f"#/$defs/{model}"}]}
    plain = json.loads(json.dumps(message))  # integer keys of maps become text, as JSON has them
    return [error.message for error in jsonschema.Draft202012Validator(document).iter_errors(plain)]


def test_documented_schema_is_current():
    """`python -m edgellm_producer.protocol > docs/protocol.schema.json` makes it so."""
    assert (ROOT / "docs" / "protocol.schema.json").read_text(encoding="utf-8") == schema_text()


def test_schema_is_a_schema():
    jsonschema.Draft202012Validator.check_schema(schema())


@pytest.mark.parametrize("model", [Job, Delta, Reply])
def test_schema_names_every_field(model: type[Job | Delta | Reply]):
    assert set(schema()["$defs"][model.__name__]["properties"]) == set(model.model_fields)


RECORDED = json.loads((ROOT / "tests" / "golden" / "protocol_v1.json").read_text(encoding="utf-8"))
SAMPLES = [
    *(pytest.param("Job", job["packed"], id=f"job-{name}") for name, job in RECORDED["jobs"].items()),
    pytest.param("Delta", RECORDED["delta"], id="delta"),
    pytest.param("Reply", RECORDED["reply"], id="reply"),
]


@pytest.mark.parametrize(("model", "packed"), SAMPLES)
def test_recorded_messages_fit_the_schema(model: str, packed: str):
    assert errors(model, msgpack.unpackb(bytes.fromhex(packed), strict_map_key=False)) == []


@pytest.mark.parametrize(
    "job",
    [
        {"v": 1, "prompt": "x"},
        {"id": "a", "prompt": "x"},
        {"v": 1, "id": "a"},
        {"v": 1, "id": "a", "prompt": "x", "messages": [{"role": "user", "content": "x"}]},
        {"v": 1, "id": "a b", "prompt": "x"},
        {"v": 1, "id": "a", "prompt": "x", "temperature": -1},
        {"v": 1, "id": "a", "prompt": "x", "colour": "red"},
        {"v": 2, "id": "a", "prompt": "x"},
    ],
)
def test_schema_refuses_wrong_jobs(job: dict[str, Any]):
    assert errors("Job", job)
