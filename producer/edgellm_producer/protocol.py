"""The protocol for those who speak it in another language: the messages' JSON Schema, and the scripts' text.

`python -m edgellm_producer.protocol > docs/protocol.schema.json` writes the schema that the documentation carries.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any, Final

from pydantic.json_schema import models_json_schema

from edgellm_producer.client import Producer
from edgellm_producer.scripts import script
from edgellm_producer.wire import Delta, Job, Reply

SCRIPTS: Final = ("submit", "status", "cancel")
_PROMPTS: Final = ("prompt", "messages", "prompt_token_ids")


def schema() -> dict[str, Any]:
    """JSON Schema (2020-12) with the definitions Job, Delta and Reply; a document of its own is any one of them.

    What one field cannot say about another (`top_logprobs` needs `logprobs`) is checked by both sides all the same.
    """
    _, document = models_json_schema(
        [(Job, "validation"), (Delta, "validation"), (Reply, "validation")], ref_template="#/$defs/{model}"
    )
    definitions = document["$defs"]
    definitions["Job"]["oneOf"] = [{"required": [name]} for name in _PROMPTS]
    definitions["Job"]["required"] = ["v", "id"]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "edgellm wire protocol, version 1",
        "anyOf": [{"$ref": f"#/$defs/{model.__name__}"} for model in (Job, Delta, Reply)],
        "$defs": definitions,
    }


def schema_text() -> str:
    return json.dumps(schema(), indent=2, ensure_ascii=False) + "\n"


def no_arguments(_: argparse.ArgumentParser) -> None:
    """The schema takes none of its own."""


async def print_schema(_: Producer, __: argparse.Namespace) -> int:
    sys.stdout.write(schema_text())
    return 0


def add_script_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", choices=SCRIPTS, help="what its arguments and its reply are stands above its code")


async def print_script(_: Producer, arguments: argparse.Namespace) -> int:
    """Exactly the text that this client sends: the server then knows it by one digest for all languages."""
    sys.stdout.write(script(arguments.name).source)
    return 0


if __name__ == "__main__":
    sys.stdout.write(schema_text())
