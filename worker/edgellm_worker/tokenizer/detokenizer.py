"""Ids to text as they come, never splitting a character.

    Detokenizer.push(id) returns the text that this id settled: whole characters only
    Detokenizer.finish() returns what was still waiting, as U+FFFD

    push(a) + push(b) + ... + finish() == Vocabulary.decode([a, b, ...])          for any ids whatsoever

Bytes that can still become a character are held back; bytes that no longer can are replaced at once. That gives what
`tokenizers` decodes from all ids together, with one exception in the byte-fallback family: there it turns a whole run
of byte tokens into U+FFFD when any byte of the run is wrong, which cannot be known until the run ends. Here the
well-formed characters of such a run are text, and only the wrong bytes are replaced.

The work per id is bounded by the length of its piece: nothing is decoded twice.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

from tokenizers import Tokenizer as Backend

from edgellm_worker.tokenizer.pieces import Piece, piece_table

_REPLACEMENT: Final = "\ufffd"
_NOTHING: Final = Piece(b"", joins=True)


class Vocabulary:
    """The pieces of one tokenizer, spelled on first use. Shared by all rows."""

    __slots__ = ("_backend", "_pieces", "_silent", "_table")

    def __init__(self, backend: Backend, silent_ids: Iterable[int]) -> None:
        """`silent_ids` are the special tokens: they are no text. Raises `ValueError` for an unknown decoder."""
        self._backend = backend
        self._table = piece_table(backend)
        self._silent = frozenset(silent_ids)
        self._pieces: dict[int, Piece] = dict.fromkeys(self._silent, _NOTHING)

    @property
    def bytewise(self) -> bool:
        return self._table.bytewise

    def piece(self, token_id: int) -> Piece:
        """What the id adds to a text; an id without a token (a padded embedding row) adds nothing."""
        piece = self._pieces.get(token_id)
        if piece is None:
            token = self._backend.id_to_token(token_id)
            piece = _NOTHING if token is None else self._table.spell(token)
            self._pieces[token_id] = piece
        return piece

    def token_text(self, token_id: int) -> str:
        """One token for people to read: special tokens by name, part of a character as U+FFFD."""
        token = self._backend.id_to_token(token_id)
        return "" if token is None else self._table.spell(token).data.decode(errors="replace")

    def decode(self, token_ids: Iterable[int]) -> str:
        detokenizer = Detokenizer(self)
        return "".join([detokenizer.push(token_id) for token_id in token_ids]) + detokenizer.finish()


class Detokenizer:
    """The text of one row. `mute_ids` are further ids that are no text for this row: its EOS ids."""

    __slots__ = ("_held", "_mute", "_vocabulary")

    def __init__(self, vocabulary: Vocabulary, mute_ids: Collection[int] = ()) -> None:
        self._vocabulary = vocabulary
        self._mute = mute_ids
        self._held = b""

    def push(self, token_id: int) -> str:
        if token_id in self._mute:
            return ""
        piece = self._vocabulary.piece(token_id)
        if piece.ascii is not None and not (self._held and piece.data):
            return piece.ascii
        if not piece.joins:
            return self.finish() + piece.data.decode()
        return self._settle(self._held + piece.data)

    def finish(self) -> str:
        """The held bytes, given up on. The row may go on: nothing is held after this."""
        held, self._held = self._held, b""
        return self._replaced(len(held)) if held else ""

    def _settle(self, data: bytes) -> str:
        parts = []
        while True:
            try:
                parts.append(data.decode())
                self._held = b""
                break
            except UnicodeDecodeError as error:
                parts.append(data[: error.start].decode())
                if error.reason == "unexpected end of data":
                    self._held = data[error.start :]
                    break
                parts.append(self._replaced(error.end - error.start))
                data = data[error.end :]
        return "".join(parts)

    def _replaced(self, num_bytes: int) -> str:
        return _REPLACEMENT * (num_bytes if self._vocabulary.bytewise else 1)
