"""Token ids to bytes, one id at a time.

Two families of tokenizer.json decoders are known, which between them cover the checkpoints this worker serves:

    byte level     every token is a string over a 256-letter alphabet that stands for bytes (GPT-2, Llama 3, Qwen);
                   bytes of neighbouring tokens join into characters
    byte fallback  tokens are text in which U+2581 is a space; a byte without a token of its own is the token `<0xNN>`
                   (SentencePiece: Llama 2, Mistral, Gemma); only byte tokens join

A decoder's `Strip` of the text's first space is left out on purpose: what a model writes continues a prompt, so the
space that begins its first word belongs to the text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from tokenizers import Tokenizer as Backend

_IGNORED_DECODERS: Final = frozenset({"Fuse", "Strip"})
_SPACE_MARK: Final = "\u2581"


@dataclass(frozen=True, slots=True)
class Piece:
    """What one id adds to the text. `joins`: its bytes may be part of a character that neighbours share.

    `ascii` is the text of a piece of whole characters that nothing before it can change, None for other pieces.
    """

    data: bytes
    joins: bool
    ascii: str | None = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ascii", self.data.decode("ascii") if self.data.isascii() else None)


class PieceTable(Protocol):
    """`bytewise`: ill-formed bytes are replaced one by one, else by their longest ill-formed run."""

    bytewise: bool

    def spell(self, token: str) -> Piece:
        """The bytes of one token, as it is spelled in the vocabulary."""


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 bytes stand for themselves, the other 68 for U+0100 onwards."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [b for b in range(256) if b not in set(kept)]
    return {chr(b): b for b in kept} | {chr(0x100 + i): b for i, b in enumerate(moved)}


class ByteLevelPieces:
    bytewise = False

    def __init__(self) -> None:
        self._alphabet = _byte_alphabet()

    def spell(self, token: str) -> Piece:
        """A token with a letter outside the alphabet (an added token, say) is plain text."""
        try:
            return Piece(bytes([self._alphabet[letter] for letter in token]), joins=True)
        except KeyError:
            return Piece(token.encode(), joins=True)


class ByteFallbackPieces:
    bytewise = True

    def __init__(self, replacements: Mapping[str, str]) -> None:
        self._replacements = dict(replacements)

    def spell(self, token: str) -> Piece:
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return Piece(bytes([int(token[3:5], 16)]), joins=True)
            except ValueError:
                pass
        for old, new in self._replacements.items():
            token = token.replace(old, new)
        return Piece(token.encode(), joins=False)


def piece_table(backend: Backend) -> PieceTable:
    """The table that a tokenizer.json's `decoder` asks for. Raises `ValueError` naming a decoder that is not known."""
    decoder = json.loads(backend.to_str())["decoder"] or {"type": "none"}
    steps: list[dict[str, Any]] = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    steps = [step for step in steps if step["type"] not in _IGNORED_DECODERS]
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return ByteLevelPieces()
    replacements: dict[str, str] = {}
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": old}, "content": new}:
                replacements[old] = new
            case {"type": "Metaspace"}:
                replacements[step.get("replacement", _SPACE_MARK)] = " "
            case {"type": "ByteFallback"}:
                pass
            case _:
                raise ValueError(f"decoder {step['type']} is not one of ByteLevel, ByteFallback, Metaspace, Replace")
    return ByteFallbackPieces(replacements)
