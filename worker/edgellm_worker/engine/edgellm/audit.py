"""Is the bundle what was asked for? Read from what was built, never from the command line that led to it.

tree sizes    verification has exactly drafts + 1 positions, the draft room for all drafts
KV dtype      base and draft agree with each other and with the checkpoint. The vendor follows an FP8 claim only where
              k_scale tensors exist, and in some spellings not at all, and then builds FP16 without a word: twice the
              memory that was planned.
weights       an unquantized weight that stays in the checkpoint is bound as FP16. A module that this product's resolver
              knows as FP8 must not appear so: its codes would be read as values.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from edgellm_worker.engine.checkpoint.quantization import Scheme
from edgellm_worker.engine.edgellm.bundle import BuiltModel, Bundle
from edgellm_worker.engine.edgellm.cache import BuildOptions
from edgellm_worker.engine.edgellm.misread import ModelFacts
from edgellm_worker.engine.errors import BuildError

_FP8: Final = "fp8"
_FP16: Final = "fp16"
_DENSE_LAYOUT: Final = "fp16"
_WEIGHT: Final = ".weight"


def audit(bundle: Bundle, options: BuildOptions, model: ModelFacts) -> None:
    """Raises `BuildError` with one line per difference."""
    problems = [*_size_problems(bundle, options), *_kv_problems(bundle, options, model)]
    problems += _weight_problems(bundle.base, model)
    if bundle.draft is not None:
        problems += _weight_problems(bundle.draft, model)
    if problems:
        raise BuildError("\n".join(f"{bundle.path}: {problem}" for problem in problems))


def _size_problems(bundle: Bundle, options: BuildOptions) -> Iterator[str]:
    if (bundle.draft is not None) != (options.num_speculative_tokens > 0):
        yield f"drafts asked for: {options.num_speculative_tokens}; draft built: {bundle.draft is not None}"
        return
    for name in (
        "max_batch_size",
        "max_input_len",
        "max_kv_cache_capacity",
        "max_verify_tree_size",
        "max_draft_tree_size",
    ):
        wanted, built = getattr(options, name), getattr(bundle, name)
        if wanted != built:
            yield f"{name}: built {built}, wanted {wanted}"


def _kv_problems(bundle: Bundle, options: BuildOptions, model: ModelFacts) -> Iterator[str]:
    dtypes = {built.role: built.kv_cache_dtype for built in (bundle.base, bundle.draft) if built is not None}
    if len(set(dtypes.values())) > 1:
        yield f"base and draft have different KV dtypes: {dtypes}"
        return
    wanted, built = _FP8 if model.has_fp8_kv else _FP16, bundle.base.kv_cache_dtype
    if wanted == built or (built == _FP16 and options.accepts_fp16_kv):
        return
    if built == _FP16:
        yield (
            "the checkpoint asks for an FP8 KV cache, the vendor built FP16 (it follows the claim only where k_scale "
            "tensors exist): twice the memory; --accept-fp16-kv takes it so"
        )
    else:
        yield f"the KV cache was built {built}, the checkpoint asks for {wanted}"


def _weight_problems(built: BuiltModel, model: ModelFacts) -> Iterator[str]:
    for binding in built.bindings:
        if binding.source_layout != _DENSE_LAYOUT:
            continue
        for key in binding.checkpoint_keys:
            scheme = model.schemes.get(key.removesuffix(_WEIGHT), Scheme.DENSE)
            if scheme is not Scheme.DENSE:
                yield f"{built.role}: {key} is {scheme} and was bound as unquantized ({binding.engine_name})"
