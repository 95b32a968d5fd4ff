"""What the operator asks of an engine beyond what drafting and the checkpoint say, and what of it contradicts itself.

A wish that is not made follows the checkpoint, and is narrowed with a log line where the machine cannot do it. A wish
that is made and cannot be met is an error that says what would work: it is never quietly something else.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from edgellm_worker.engine.errors import CapacityError


class WeightForm(StrEnum):
    """`--quantization`: how weights must run. FLOAT16 decodes all of them; the others must run as they are stored."""

    FP8 = "fp8"
    NVFP4 = "nvfp4"
    FLOAT16 = "float16"


class KvCacheDtype(StrEnum):
    """`--kv-cache-dtype`. AUTO is what the checkpoint says."""

    AUTO = "auto"
    FLOAT16 = "float16"
    FP8 = "fp8"


@dataclass(frozen=True, slots=True)
class TreeSizes:
    """Drafts are a chain, so a verify pass takes the last token and the drafts. Larger sizes reserve memory for longer
    drafts, and one bundle then serves every draft length up to `max_draft_tree_size`.
    """

    max_verify_tree_size: int
    max_draft_tree_size: int

    @classmethod
    def of(cls, num_drafts: int, verify: int | None, draft: int | None) -> Self:
        """What was not given follows from the rest. Raises `CapacityError` naming every contradiction."""
        problems = tree_problems(num_drafts, verify, draft)
        if problems:
            raise CapacityError("\n".join(problems))
        drafted = num_drafts if draft is None else draft
        return cls(drafted + 1 if verify is None else verify, drafted)


def tree_problems(num_drafts: int | None, verify: int | None, draft: int | None) -> list[str]:
    """`num_drafts` None: not known yet."""
    problems = []
    if num_drafts is not None and draft is not None and draft < num_drafts:
        problems.append(f"max-draft-tree-size {draft} is below num_speculative_tokens, {num_drafts}")
    if num_drafts is not None and verify is not None and verify < num_drafts + 1:
        problems.append(f"max-verify-tree-size {verify} is below num_speculative_tokens + 1, {num_drafts + 1}")
    if draft is not None and verify is not None and verify < draft + 1:
        problems.append(f"max-verify-tree-size {verify} is below max-draft-tree-size + 1, {draft + 1}")
    return problems
