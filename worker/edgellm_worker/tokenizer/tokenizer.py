"""A checkpoint's tokenizer files, read once: tokenizer.json, tokenizer_config.json, the chat template, the EOS ids.

A prompt is tokenized as it stands: nothing is added in front, and special tokens spelled out in it are read as such
(a chat template writes them). EOS ids are the union of what generation_config.json, config.json and the tokenizer name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from edgellm_producer.errors import JobRejected
from edgellm_producer.wire import ErrorCode, Job
from edgellm_worker.engine.errors import CheckpointError
from edgellm_worker.tokenizer.chat_template import ChatTemplate
from edgellm_worker.tokenizer.detokenizer import Detokenizer, Vocabulary
from edgellm_worker.tokenizer.output_text import OutputText

_TOOL_TEMPLATE = "tool_use"


class Tokenizer:
    """Shared by all rows; safe to call from several threads."""

    __slots__ = ("_backend", "_templates", "_vocabulary", "eos_token_ids", "generation_config")

    def __init__(self, model_dir: Path) -> None:
        """Raises `CheckpointError` naming the file that cannot be used."""
        config = _read(model_dir / "config.json", required=True)
        names = _read(model_dir / "tokenizer_config.json")
        self.generation_config: Mapping[str, Any] = _read(model_dir / "generation_config.json")
        path = model_dir / "tokenizer.json"
        try:
            self._backend = Backend.from_file(str(path))
            added = self._backend.get_added_tokens_decoder()
            self._vocabulary = Vocabulary(self._backend, (i for i, token in added.items() if token.special))
        except Exception as error:  # the library raises bare Exception for every fault of the file
            raise CheckpointError([f"{path}: {error}"]) from error
        self._backend.no_truncation()
        self._backend.no_padding()
        special = _special_tokens(names)
        self.eos_token_ids = self._eos_ids(config, special.get("eos_token"))
        self._templates = _templates(model_dir, names, special)

    @property
    def has_chat_template(self) -> bool:
        return "default" in self._templates

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._backend.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: tuple[int, ...] | list[int]) -> str:
        """The text of all ids together, special tokens left out: what the deltas of `output_text` add up to."""
        return self._vocabulary.decode(token_ids)

    def token_text(self, token_id: int) -> str:
        """One token for people to read (log-probabilities)."""
        return self._vocabulary.token_text(token_id)

    def output_text(
        self, stop_strings: list[str] | tuple[str, ...] = (), eos_ids: frozenset[int] = frozenset()
    ) -> OutputText:
        """The text of a new row; its EOS ids are no text, whether the tokenizer calls them special or not."""
        return OutputText(Detokenizer(self._vocabulary, eos_ids), stop_strings)

    def prompt_token_ids(self, job: Job) -> tuple[int, ...]:
        """The ids of a job's prompt, messages or prompt_token_ids. Raises `JobRejected` naming the field."""
        if job.prompt_token_ids is not None:
            return tuple(job.prompt_token_ids)
        if job.prompt is not None:
            return self._not_empty(self.encode(job.prompt), "prompt")
        tools = job.tools if job.tool_choice != "none" else None
        template = self._templates.get(_TOOL_TEMPLATE) if tools else None
        template = template or self._templates.get("default")
        if template is None:
            message = "this checkpoint has no chat template: send a prompt instead"
            raise JobRejected(ErrorCode.TEMPLATE_ERROR, message, field="messages")
        text = template.render(job.messages or [], tools, job.chat_template_kwargs or {})
        return self._not_empty(self.encode(text), "messages")

    @staticmethod
    def _not_empty(token_ids: tuple[int, ...], field: str) -> tuple[int, ...]:
        if not token_ids:
            raise JobRejected(ErrorCode.INVALID_FIELD, "gives no tokens", field=field)
        return token_ids

    def _eos_ids(self, config: Mapping[str, Any], eos_token: str | None) -> frozenset[int]:
        text_config = config.get("text_config")
        found: set[int] = set()
        for file, fields in (
            ("generation_config.json", self.generation_config),
            ("config.json", config),
            ("config.json", text_config if isinstance(text_config, dict) else {}),
        ):
            given = fields.get("eos_token_id")
            ids = [given] if isinstance(given, int) else given or []
            if not isinstance(ids, list) or not all(isinstance(one, int) for one in ids):
                raise CheckpointError([f"{file}: eos_token_id is {given!r}, not an id or a list of ids"])
            found.update(ids)
        own = self._backend.token_to_id(eos_token) if eos_token else None
        return frozenset(found if own is None else found | {own})


def _read(path: Path, *, required: bool = False) -> dict[str, Any]:
    if not path.exists() and not required:
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError([f"{path}: {error}"]) from error
    if not isinstance(value, dict):
        raise CheckpointError([f"{path}: not a JSON object"])
    return value


def _special_tokens(names: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token`, `eos_token`, ... by name; each is given as a string or as an object with `content`."""
    spelled = {
        name: token.get("content") if isinstance(token, dict) else token
        for name, token in names.items()
        if name.endswith("_token") and isinstance(token, str | dict)
    }
    return {name: token for name, token in spelled.items() if isinstance(token, str)}


def _templates(model_dir: Path, names: Mapping[str, Any], special: Mapping[str, str]) -> dict[str, ChatTemplate]:
    """By name. chat_template.jinja wins over tokenizer_config.json, which holds one or a list of named ones."""
    path = model_dir / "chat_template.jinja"
    given: Any = names.get("chat_template") or {}
    try:
        if path.exists():
            given = path.read_text(encoding="utf-8")
        else:
            path = model_dir / "tokenizer_config.json"
        if isinstance(given, list):
            given = {str(entry["name"]): entry["template"] for entry in given}
        sources: dict[str, str] = {"default": given} if isinstance(given, str) else dict(given)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError([f"{path}: chat template: {type(error).__name__}: {error}"]) from error
    templates: dict[str, ChatTemplate] = {}
    for name, source in sources.items():
        try:
            templates[name] = ChatTemplate(source, special)
        except (ValueError, TypeError) as error:
            raise CheckpointError([f"{path}: chat template {name}: {error}"]) from error
    return templates
