"""What a job leaves unset: first the checkpoint's generation_config, then documented constants.

    field                given by                                                       else
    temperature          job; generation_config (0 when its do_sample is false)          1
    top_p, top_k, min_p  job; generation_config                                          1, off, 0
    repetition_penalty   job; generation_config                                          1
    seed                 job; the id's hash, so that every attempt writes the same text
    the rest             job                                                             no effect

generation_config's own top_p, top_k, min_p and repetition_penalty hold for jobs that leave them unset even when the job
sets a temperature. A `top_k` of 0 or -1 is off.

The seed of a job without one is pinned: the first 8 bytes of SHA-256 of its id, big-endian, with the top bit cleared.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from edgellm_producer.wire import Job
from edgellm_worker.engine.api import SamplingParams
from edgellm_worker.engine.errors import CheckpointError

_SEED_MASK: Final = (1 << 63) - 1

_CONSTANTS: Final = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
_RANGES: Final[Mapping[str, tuple[float, float]]] = {
    "temperature": (0.0, 100.0),
    "top_p": (math.ulp(0.0), 1.0),
    "top_k": (-1, (1 << 31) - 1),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (math.ulp(0.0), 100.0),
}


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """One checkpoint's defaults: what a job gets that says nothing."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def read(cls, generation_config: Mapping[str, Any]) -> SamplingDefaults:
        """Raises `CheckpointError` naming every field of generation_config.json that is out of range."""
        values: dict[str, Any] = {
            name: constant if generation_config.get(name) is None else generation_config[name]
            for name, constant in _CONSTANTS.items()
        }
        problems = [
            f"generation_config.json: {name} is {values[name]!r}, not a number from {low:g} to {high:g}"
            for name, (low, high) in _RANGES.items()
            if isinstance(values[name], bool)
            or not isinstance(values[name], int | float)
            or not low <= values[name] <= high
        ]
        if problems:
            raise CheckpointError(problems)
        if generation_config.get("do_sample") is False:
            values["temperature"] = 0.0
        values["top_k"] = max(0, int(values["top_k"]))
        return cls(**values)


def seed_of(job_id: str) -> int:
    """The seed of a job that names none, from 0 to 2^63 - 1."""
    return int.from_bytes(hashlib.sha256(job_id.encode()).digest()[:8]) & _SEED_MASK


def resolve_sampling(job: Job, defaults: SamplingDefaults) -> SamplingParams:
    """Every field set. Nothing is refused here: the wire has checked the job, `read` the defaults."""
    return SamplingParams(
        temperature=defaults.temperature if job.temperature is None else job.temperature,
        top_p=defaults.top_p if job.top_p is None else job.top_p,
        top_k=defaults.top_k if job.top_k is None else max(0, job.top_k),
        min_p=defaults.min_p if job.min_p is None else job.min_p,
        repetition_penalty=defaults.repetition_penalty if job.repetition_penalty is None else job.repetition_penalty,
        frequency_penalty=job.frequency_penalty or 0.0,
        presence_penalty=job.presence_penalty or 0.0,
        logit_bias=job.logit_bias or {},
        seed=seed_of(job.id) if job.seed is None else job.seed,
        top_logprobs=(job.top_logprobs or 0) if job.logprobs else None,
    )
