"""Messages to a prompt, by the checkpoint's own Jinja template.

The template sees what it was written for, which is transformers' `apply_chat_template`: a sandbox with `trim_blocks`
and `lstrip_blocks`, the loop controls, `{% generation %}` blocks (whose marking is of no use here), `raise_exception`,
`strftime_now`, and a `tojson` that escapes nothing; the variables `messages`, `tools`, `documents`,
`add_generation_prompt`, the special tokens by name, and the job's `chat_template_kwargs`.

Messages are data and cannot reach out of the sandbox. A template is code from a checkpoint that somebody downloaded, so
it is bounded too: in time (it runs in a thread of its own, which is interrupted), in the length of what it writes, and
in the size of what one multiplication or power makes, which no interrupt would reach. Whatever goes wrong is the job's
rejection: `template_error`, with the template's own words.
"""

from __future__ import annotations

import ctypes
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from edgellm_producer.errors import JobRejected
from edgellm_producer.wire import ErrorCode

DEFAULT_LIMIT_S: Final = 5.0
DEFAULT_MAX_CHARACTERS: Final = 8 << 20
_MAX_PRODUCT: Final = 1 << 20
_RESERVED: Final = frozenset({"messages", "tools", "chat_template", "tokenize", "continue_final_message"})
_REASONING_FIELDS: Final = ("reasoning_content", "thinking", "reasoning")


class _RenderInterrupted(BaseException):
    """Raised into the rendering thread from outside; no `except Exception` on the way may keep it."""


class _GenerationBlocks(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's words for training; here it is its body."""

    tags = {"generation"}  # noqa: RUF012 - the name and kind are Jinja's

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Refuse results that would take the machine's memory or minutes of uninterruptible arithmetic."""
        if operator == "**" and (abs(right) > 64 or abs(left) > _MAX_PRODUCT):
            raise jinja2.TemplateError("power too large")
        if operator == "*":
            for sequence, count in ((left, right), (right, left)):
                if isinstance(sequence, str | list | tuple) and len(sequence) * count > _MAX_PRODUCT:
                    raise jinja2.TemplateError("repetition too long")
        return super().call_binop(context, operator, left, right)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> _Sandbox:
    env = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, loopcontrols], autoescape=False)
    env.filters["tojson"] = _tojson
    env.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return env


def _walks_content(tree: nodes.Template) -> bool:
    """Whether the template loops over a message's content, so that it takes a list of parts itself."""
    for loop in tree.find_all(nodes.For):
        named = [getattr(node, key, None) for node in _subtree(loop.iter) for key in ("name", "attr", "value")]
        if "content" in [name for name in named if isinstance(name, str)]:
            return True
    return False


def _subtree(node: nodes.Node) -> Iterator[nodes.Node]:
    yield node
    yield from node.find_all(nodes.Node)


class ChatTemplate:
    """One compiled template. Thread-safe: a render shares nothing but the compiled code."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        limit_s: float = DEFAULT_LIMIT_S,
        max_characters: int = DEFAULT_MAX_CHARACTERS,
    ) -> None:
        """Raises `ValueError` when the source is no Jinja template."""
        env = _environment()
        try:
            self._takes_parts = _walks_content(env.parse(source))
            self._template = env.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"line {error.lineno}: {error.message}") from error
        self._special_tokens = dict(special_tokens)
        self._limit_s = limit_s
        self._max_characters = max_characters

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None, kwargs: Mapping[str, Any] = {}
    ) -> str:
        """The prompt. Raises `JobRejected` (template_error, unsupported_field, invalid_field) naming the field."""
        reserved = sorted(_RESERVED.intersection(kwargs))
        if reserved:
            raise JobRejected(
                ErrorCode.INVALID_FIELD, f"{reserved[0]} cannot be passed to the template", field="chat_template_kwargs"
            )
        variables = {
            "documents": None,
            "add_generation_prompt": True,
            **self._special_tokens,
            **kwargs,
            "messages": [self._message(index, message) for index, message in enumerate(messages)],
            "tools": tools or None,
        }
        return _within(self._limit_s, lambda: self._text(variables))

    def _text(self, variables: Mapping[str, Any]) -> str:
        parts, num_characters = [], 0
        for part in self._template.generate(variables):
            parts.append(part)
            num_characters += len(part)
            if num_characters > self._max_characters:
                raise jinja2.TemplateError(f"wrote more than {self._max_characters} characters")
        return "".join(parts)

    def _message(self, index: int, message: Mapping[str, Any]) -> dict[str, Any]:
        """As templates expect it: no empty fields, reasoning under every name in use, arguments as objects."""
        given = {key: value for key, value in message.items() if value is not None}
        if isinstance(given.get("content"), list):
            given["content"] = self._content(index, given["content"])
        reasoning = next((given[key] for key in _REASONING_FIELDS if key in given), None)
        if reasoning is not None:
            given = {"thinking": reasoning, **given, "reasoning_content": reasoning}
        if isinstance(given.get("tool_calls"), list):
            given["tool_calls"] = [_with_object_arguments(call) for call in given["tool_calls"]]
        return given

    def _content(self, index: int, parts: list[Any]) -> Any:
        for part in parts:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            if kind != "text" or not isinstance(part.get("text"), str):
                message = f"message {index} has a content part of type {kind}; this worker takes text only"
                raise JobRejected(ErrorCode.UNSUPPORTED_FIELD, message, field="messages")
        return parts if self._takes_parts else "\n".join(part["text"] for part in parts)


def _with_object_arguments(call: Any) -> Any:
    """OpenAI bodies carry a call's arguments as a JSON string; templates write them out as an object."""
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        return call
    arguments = call["function"].get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        parsed = json.loads(arguments)
    except ValueError:
        return call
    if not isinstance(parsed, dict):
        return call
    return {**call, "function": {**call["function"], "arguments": parsed}}


def _within(limit_s: float, render: Callable[[], str]) -> str:
    """Run `render` in its own thread for at most `limit_s`; every failure becomes the job's rejection."""
    outcome: list[str | Exception] = []

    def run() -> None:
        try:
            outcome.append(render())
        except Exception as error:  # noqa: BLE001 - an edge: a template can raise anything, and the job must be answered
            outcome.append(error)
        except _RenderInterrupted:
            return

    thread = threading.Thread(target=run, name="chat-template", daemon=True)
    thread.start()
    thread.join(limit_s)
    if thread.is_alive() and not outcome:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(thread.ident or 0), ctypes.py_object(_RenderInterrupted)
        )
        thread.join(1.0)
        raise _rejection(f"took longer than {limit_s:g} s")
    result = outcome[0]
    if isinstance(result, str):
        return result
    raise _rejection(str(result) or type(result).__name__) from result


def _rejection(message: str) -> JobRejected:
    return JobRejected(ErrorCode.TEMPLATE_ERROR, f"the chat template failed: {message}", field="messages")
