"""Structured output: which tokens may follow, so that a row's text is of a JSON schema or a regular expression.

A constraint travels as JSON text with one key (`GenerationRequest.grammar`):

    {"json_schema": {...}}        text is a JSON document of this schema, on one line
    {"regex": "..."}              text matches the whole expression (Rust's regex syntax)

The parsing is llguidance's. A row has one `Grammar`, which stands behind its committed tokens; the sampler masks what
it draws with it, at every verify position after the tokens accepted before. So drafting changes nothing here either:
what is emitted is a draw from the model's distribution within the grammar. Drafts are masked by a copy that runs ahead.

EOS is allowed exactly when the text is complete, and is the only token allowed when nothing more can follow; a row with
a constraint must therefore have an EOS id.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from edgellm_worker.engine.api import GenerationRequest
from edgellm_worker.engine.errors import CheckpointError, RequestError, RowError

FIELD: Final = "response_format"

_JSON_STYLE: Final[Any] = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "lenient": False,
}
"""One line with a space after commas and colons: where any white space may follow, small models write nothing else."""

_NOTHING_MAY_FOLLOW: Final = "NoExtensionBias"  # in llguidance's words
_NO_TEXT: Final = (
    "no text meets it: an expression without a match, or a $ref that leads back to itself and to nothing else"
)


class Grammar:
    """One row's place in its constraint."""

    __slots__ = ("_allowed", "_matcher", "_vocab_size")

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._allowed: NDArray[np.bool_] | None = None

    def copy(self) -> Grammar:
        return Grammar(self._matcher.deep_copy(), self._vocab_size)

    def check(self) -> None:
        """Raise `RequestError` where nothing may come first. The first step needs that mask too: it is kept."""
        try:
            self.allowed()
        except RowError as error:
            reason = _error(self._matcher)
            raise RequestError(FIELD, _NO_TEXT if reason == _NOTHING_MAY_FOLLOW else reason) from error

    def take(self, token_id: int) -> None:
        """The token follows. Raises `RowError` when it must not."""
        self._allowed = None
        if not self._matcher.consume_token(token_id):
            raise RowError(f"structured output: {_error(self._matcher)}")

    def allowed(self) -> NDArray[np.bool_]:
        """What may follow: bool [V]. Raises `RowError` when the constraint became too complex to go on."""
        if self._allowed is None:
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            if self._matcher.is_error():
                raise RowError(f"structured output: {_error(self._matcher)}")
            self._allowed = np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)
        return self._allowed


class GrammarCompiler:
    """Makes grammars over one checkpoint's vocabulary; the vocabulary is read when the first is asked for."""

    def __init__(self, tokenizer_json: Path, vocab_size: int) -> None:
        self._path = tokenizer_json
        self._vocab_size = vocab_size
        self._vocabularies: dict[frozenset[int], LLTokenizer] = {}

    def grammar(self, request: GenerationRequest) -> Grammar:
        """The start of the request's constraint. Raises `RequestError`; `CheckpointError` for the tokenizer file."""
        source = _source(request)
        eos = request.eos_token_ids
        if eos not in self._vocabularies:
            try:
                text = self._path.read_text(encoding="utf-8")
                self._vocabularies[eos] = LLTokenizer(text, n_vocab=self._vocab_size, eos_token=sorted(eos))
            except (OSError, ValueError) as error:
                raise CheckpointError([f"{self._path}: {error}"]) from error
        matcher = LLMatcher(self._vocabularies[eos], source, log_level=0)
        if matcher.is_error():
            raise RequestError(FIELD, _error(matcher))
        beginning = Grammar(matcher, self._vocab_size)
        beginning.check()
        return beginning


def check_grammar(request: GenerationRequest) -> None:
    """Raise `RequestError` for a constraint that cannot be met; needs no vocabulary."""
    if request.grammar is None:
        return
    is_error, messages = LLMatcher.validate_grammar_with_warnings(_source(request))
    if is_error or messages:  # a warning is a keyword of the schema that would be ignored
        raise RequestError(FIELD, "; ".join(messages))
    if not request.eos_token_ids:
        raise RequestError(FIELD, "needs an EOS token to end with: it does not go with ignore_eos")


def _error(matcher: LLMatcher) -> str:
    """What went wrong, without the dump of the parser's state that follows."""
    return str(matcher.get_error().partition("\n")[0])


def _source(request: GenerationRequest) -> str:
    """The constraint as llguidance spells it."""
    try:
        match json.loads(request.grammar or "null"):
            case {"json_schema": dict() as schema}:
                return str(LLMatcher.grammar_from_json_schema(schema, overrides=_JSON_STYLE))
            case {"regex": str() as regex}:
                return str(LLMatcher.grammar_from_regex(regex))
    except ValueError as error:
        raise RequestError(FIELD, str(error)) from error
    raise RequestError(FIELD, "is neither a json_schema nor a regex")
