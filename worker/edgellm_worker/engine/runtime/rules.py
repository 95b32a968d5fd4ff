"""What a request may ask of the speculative engine. Pure, so that a parent process can check for its child."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from edgellm_worker.engine.api import EngineLimits, GenerationRequest
from edgellm_worker.engine.errors import RequestError
from edgellm_worker.engine.runtime.grammar import check_grammar
from edgellm_worker.engine.runtime.sampling import check_params


@dataclass(frozen=True, slots=True)
class SpeculativeRules:
    limits: EngineLimits

    def compat_key(self, request: GenerationRequest) -> Hashable:
        """Everything about a row is the row's own: any two requests may share a batch."""
        del request
        return ()

    def validate(self, request: GenerationRequest) -> None:
        """Raise `RequestError` naming the job's field when this request can never run here."""
        self._check_prompt(request.prompt_token_ids)
        most = self.limits.max_new_tokens(len(request.prompt_token_ids))
        if not 1 <= request.max_new_tokens <= most:
            message = f"{request.max_new_tokens} is not within 1 to {most}, what this prompt leaves of the context"
            code = "context_length_exceeded" if request.max_new_tokens > most else "invalid_field"
            raise RequestError("max_tokens", message, code=code)
        check_params(request.sampling, self.limits.vocab_size)
        check_grammar(request)

    def _check_prompt(self, token_ids: tuple[int, ...]) -> None:
        if not token_ids:
            raise RequestError("prompt_token_ids", "is empty")
        limits = self.limits
        most = min(limits.max_input_len, limits.max_kv_cache_capacity - limits.num_speculative_tokens)
        if len(token_ids) > most:
            message = f"{len(token_ids)} tokens, this engine takes {most}"
            raise RequestError("prompt_token_ids", message, code="context_length_exceeded")
        outside = next((i for i in token_ids if not 0 <= i < limits.vocab_size), None)
        if outside is not None:
            raise RequestError("prompt_token_ids", f"{outside} is outside the vocabulary of {limits.vocab_size}")
