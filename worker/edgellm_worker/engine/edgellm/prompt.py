"""Token ids as text.

The runtime's Python interface takes text only (its C++ request can carry ids, the binding cannot), and tokenizes it
again. So a prompt is decoded with the checkpoint's own tokenizer, special tokens spelled out, and is taken only when
encoding that text gives back exactly the ids that were asked for. What does not survive (ids that are half a
character, or pieces that the tokenizer would merge) is refused rather than run as something else. Whether the
*runtime's* tokenizer agrees is checked by count before a batch starts (row_engine.py).
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from edgellm_worker.engine.errors import CheckpointError, RequestError


class PromptText:
    def __init__(self, model_dir: Path) -> None:
        """Raises `CheckpointError` when the checkpoint has no readable tokenizer.json."""
        path = model_dir / "tokenizer.json"
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for every fault of the file
            raise CheckpointError([f"{path}: {error}"]) from error

    def of(self, token_ids: tuple[int, ...]) -> str:
        """Raises `RequestError` when no text stands for exactly these ids."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=False)
        again = self._tokenizer.encode(text, add_special_tokens=False).ids
        if tuple(again) != token_ids:
            position = next(
                (i for i, (a, b) in enumerate(zip(token_ids, again, strict=False)) if a != b),
                min(len(again), len(token_ids)),
            )
            message = f"this engine's runtime takes text, but no text gives these ids (first at position {position})"
            raise RequestError("prompt_token_ids", message)
        return text
