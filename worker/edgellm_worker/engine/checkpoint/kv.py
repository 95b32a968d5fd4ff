"""The KV cache's scheme and scales, for base and draft.

Draft KV rule. The draft's cache is kept as the base's is: one `kv_cache_quant_algo` (or `kv_cache_scheme`) speaks of
both. A cache claimed FP8 without scales in the files has scale 1.0, and that is said: it is never silently kept in
another type. Scales belong to their namespace: those of base layer 0 are not the draft's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from edgellm_worker.engine.checkpoint.forms import check_scalar
from edgellm_worker.engine.checkpoint.layout import Namespace
from edgellm_worker.engine.checkpoint.names import NameTable
from edgellm_worker.engine.checkpoint.problems import ProblemLog
from edgellm_worker.engine.checkpoint.quantization import KvClaim, KvScheme, QuantClaims
from edgellm_worker.engine.checkpoint.shard import TensorEntry

# Where exports put them, under layers.N.self_attn: ModelOpt beside the projection, compressed-tensors on the module.
_HOMES = {
    "k_scale": ("self_attn.k_proj", "self_attn.qkv_proj", "self_attn", "self_attn.attn"),
    "v_scale": ("self_attn.v_proj", "self_attn.qkv_proj", "self_attn", "self_attn.attn"),
}


@dataclass(frozen=True, slots=True)
class KvPair:
    """The scale tensors of one attention layer; None where the files have none."""

    k_scale: TensorEntry | None
    v_scale: TensorEntry | None

    @property
    def entries(self) -> tuple[TensorEntry, ...]:
        return tuple(entry for entry in (self.k_scale, self.v_scale) if entry is not None)


@dataclass(frozen=True, slots=True)
class KvPlan:
    """One namespace's cache. `pairs` by attention layer; `reason` says in words what decided the scheme."""

    scheme: KvScheme
    reason: str
    pairs: dict[int, KvPair]


def plan_kv(
    names: NameTable, claims: Sequence[QuantClaims], layers: Mapping[Namespace, Sequence[int]], problems: ProblemLog
) -> dict[Namespace, KvPlan]:
    """`layers` lists the attention layers of each namespace there is, base first."""
    pairs = {
        namespace: {layer: _pair(names, namespace, layer, problems) for layer in indices}
        for namespace, indices in layers.items()
    }
    first = next((entry for of_layer in pairs.values() for pair in of_layer.values() for entry in pair.entries), None)
    claim = next((claims_of.kv for claims_of in claims if claims_of.kv is not None), None)
    scheme, reason = _scheme(claim, first, problems)
    plans = {}
    for namespace, of_layer in pairs.items():
        why = f"{reason}{_missing(scheme, of_layer)}"
        plans[namespace] = KvPlan(scheme, why if namespace is Namespace.BASE else f"as the base: {why}", of_layer)
    return plans


def _pair(names: NameTable, namespace: Namespace, layer: int, problems: ProblemLog) -> KvPair:
    found: dict[str, TensorEntry | None] = {}
    for leaf, homes in _HOMES.items():
        entries = [names.find(namespace, f"layers.{layer}.{home}", leaf) for home in homes]
        held = [entry for entry in entries if entry is not None]
        for twice in held[1:]:
            problems.add(twice.file, f"a second {leaf} beside {held[0].name}", tensor=twice.name)
        found[leaf] = held[0] if held and check_scalar(held[0], problems) else None
    return KvPair(found["k_scale"], found["v_scale"])


def _scheme(claim: KvClaim | None, first: TensorEntry | None, problems: ProblemLog) -> tuple[KvScheme, str]:
    if claim is None:
        if first is None:
            return KvScheme.UNQUANTIZED, "no config speaks of it and no scales are in the files"
        return KvScheme.FP8, f"no config speaks of it; the files hold scales (first: {first.name})"
    if claim.scheme is KvScheme.UNQUANTIZED and first is not None:
        problems.add(first.file, f"a KV cache scale, but in {claim.file} {claim.text}", tensor=first.name)
    return claim.scheme or KvScheme.UNQUANTIZED, f"{claim.file}: {claim.text}"


def _missing(scheme: KvScheme, of_layer: dict[int, KvPair]) -> str:
    """What is said when scales are assumed."""
    if scheme is not KvScheme.FP8:
        return ""
    bare = [layer for layer, pair in of_layer.items() if len(pair.entries) < 2]
    if not bare:
        return ""
    if len(bare) == len(of_layer):
        return "; no k_scale/v_scale in the files: scale 1.0"
    return f"; no k_scale/v_scale for layers {', '.join(map(str, bare))}: scale 1.0 there"
