"""What both ways of driving the runtime share: what the engine says of itself, and the making of a row."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from edgellm_worker.engine.api import EngineLimits, EngineTraits, GenerationRequest
from edgellm_worker.engine.edgellm.book import RowBook
from edgellm_worker.engine.edgellm.fields import BatchFields, batch_fields
from edgellm_worker.engine.edgellm.prompt import PromptText
from edgellm_worker.engine.edgellm.rows import Row
from edgellm_worker.engine.edgellm.rules import EdgeLlmRules, drafting_off
from edgellm_worker.engine.errors import CapacityError


@dataclass(frozen=True, slots=True)
class Admitted:
    """A row of the book, and what its native request is made of."""

    row: Row
    text: str
    fields: BatchFields


class RowEngine:
    """`num_drafts` is 0 for a bundle without a draft."""

    def __init__(self, rules: EdgeLlmRules, traits: EngineTraits, prompts: PromptText, num_drafts: int) -> None:
        self._rules = rules
        self._traits = traits
        self._prompts = prompts
        self._num_drafts = num_drafts
        self._book = RowBook()

    @property
    def limits(self) -> EngineLimits:
        return self._rules.limits

    @property
    def traits(self) -> EngineTraits:
        return self._traits

    @property
    def num_rows(self) -> int:
        return len(self._book)

    def compat_key(self, request: GenerationRequest) -> Hashable:
        return self._rules.compat_key(request)

    def validate(self, request: GenerationRequest) -> None:
        self._rules.validate(request)

    def _admit(self, row_id: int, request: GenerationRequest) -> Admitted:
        """Raises what `validate` raises, and `CapacityError` when all slots are taken."""
        self.validate(request)
        if self.num_rows >= self.limits.max_batch_size:
            raise CapacityError(f"all {self.limits.max_batch_size} slots are taken")
        fields = batch_fields(request.sampling)
        num_drafts = 0 if fields.disable_spec_decode else self._num_drafts
        row = Row(row_id, request, num_drafts, drafting_off(request) if self._num_drafts else None)
        admitted = Admitted(row, self._prompts.of(request.prompt_token_ids), fields)
        self._book.put(row)
        return admitted


def reads_otherwise(row: Row, counted: Sequence[int]) -> bool:
    """The runtime tokenizes the text itself, and its limits count *its* tokens: a prompt that it reads otherwise is not
    the prompt that was asked for, and fails alone, before it can fail a batch.
    """
    expected = len(row.request.prompt_token_ids)
    if list(counted) == [expected]:
        return False
    row.fail(f"the runtime's tokenizer reads this prompt as {counted[0]} tokens, the checkpoint's as {expected}")
    return True
