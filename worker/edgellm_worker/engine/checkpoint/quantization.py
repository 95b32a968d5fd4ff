"""What the configs claim about quantization. The files decide in the end; a claim that they contradict is an error.

Two homes, one meaning:

    hf_quant_config.json  {"quantization": {quant_algo, kv_cache_quant_algo, exclude_modules, quantized_layers}}
    config.json           {"quantization_config": {...}}: ModelOpt's copy of the above, or compressed-tensors'
                          config_groups + ignore, whose targets are module names, "Linear", or "re:" and an expression

hf_quant_config.json wins. A module is looked up under its own namespace's spellings only, most specific entry first:
its own name, then the exclude list, then the entries that cover it (a parent, a wildcard), then the model-wide default.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from edgellm_worker.engine.checkpoint.folder import CONFIG, QUANT_CONFIG
from edgellm_worker.engine.checkpoint.jsonfile import JsonObject
from edgellm_worker.engine.checkpoint.problems import ProblemLog


class Scheme(StrEnum):
    """How a weight is stored."""

    DENSE = "unquantized"
    FP8 = "FP8"
    NVFP4 = "NVFP4"


class KvScheme(StrEnum):
    """How the KV cache is kept: in the model's own floating type, or e4m3 with scales."""

    UNQUANTIZED = "unquantized"
    FP8 = "FP8"


# ModelOpt's algorithm names. W4A16 differs in the activations alone: it has no input_scale.
ALGORITHMS: Mapping[str, Scheme] = {"FP8": Scheme.FP8, "NVFP4": Scheme.NVFP4, "W4A16_NVFP4": Scheme.NVFP4}
KV_ALGORITHMS: Mapping[str, KvScheme] = {"FP8": KvScheme.FP8}
MIXED = "MIXED_PRECISION"
SUPPORTED = "supported: " + ", ".join(ALGORITHMS)

MAX_ENTRIES = 200_000
MAX_PATTERNS = 1000
MAX_PATTERN_LENGTH = 256


class ClaimKind(StrEnum):
    """How specific a claim is."""

    MODULE = "module"
    EXCLUDED = "excluded"
    DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class Setting:
    """`scheme` None: an algorithm that this product does not know. `algorithm` is the config's own word."""

    algorithm: str
    scheme: Scheme | None


@dataclass(frozen=True, slots=True)
class Claim:
    """What one config says of one module."""

    setting: Setting
    kind: ClaimKind
    file: str


@dataclass(frozen=True, slots=True)
class KvClaim:
    """`scheme` None: said, but not one that this product knows (reported)."""

    scheme: KvScheme | None
    file: str
    text: str


@dataclass(frozen=True, slots=True)
class Pattern:
    """`text` as in the config; `matches` a whole module name."""

    text: str
    matches: Callable[[str], object]


UNQUANTIZED = Setting("unquantized", Scheme.DENSE)


@dataclass(frozen=True, slots=True)
class QuantClaims:
    """All claims of one config file. `kv` None: it does not speak of the KV cache."""

    file: str
    default: Setting | None
    named: Mapping[str, Setting]
    named_patterns: tuple[tuple[Pattern, Setting], ...]
    excluded: frozenset[str]
    excluded_patterns: tuple[Pattern, ...]
    kv: KvClaim | None

    def of(self, aliases: Sequence[str]) -> Claim | None:
        """The claim about a module known under `aliases`, or None when this file says nothing of it."""
        own = next((self.named[alias] for alias in aliases if alias in self.named), None)
        if own is not None:
            return Claim(own, ClaimKind.MODULE, self.file)
        if self._is_excluded(aliases):
            return Claim(UNQUANTIZED, ClaimKind.EXCLUDED, self.file)
        covering = self._covering(aliases)
        if covering is not None:
            return Claim(covering, ClaimKind.MODULE, self.file)
        return None if self.default is None else Claim(self.default, ClaimKind.DEFAULT, self.file)

    def _is_excluded(self, aliases: Sequence[str]) -> bool:
        by_name = any(name in self.excluded for alias in aliases for name in _with_parents(alias))
        return by_name or any(pattern.matches(alias) for pattern in self.excluded_patterns for alias in aliases)

    def _covering(self, aliases: Sequence[str]) -> Setting | None:
        for alias in aliases:
            for name in _with_parents(alias):
                if name in self.named:
                    return self.named[name]
        for pattern, setting in self.named_patterns:
            if any(pattern.matches(alias) for alias in aliases):
                return setting
        return None


def _with_parents(name: str) -> list[str]:
    """a.b.c, a.b, a"""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(len(parts), 0, -1)]


def read_claims(config: JsonObject, quant_config: JsonObject | None, problems: ProblemLog) -> tuple[QuantClaims, ...]:
    """The claims by authority, strongest first; empty when neither config speaks of quantization."""
    claims = []
    if quant_config is not None:
        inner = quant_config.get("quantization")
        if isinstance(inner, dict):
            claims.append(_Reader(QUANT_CONFIG, inner, problems).modelopt())
        else:
            problems.add(QUANT_CONFIG, "missing", tensor="quantization")
    embedded = config.get("quantization_config")
    if isinstance(embedded, dict):
        claims.append(_Reader(CONFIG, embedded, problems).embedded())
    elif embedded is not None:
        problems.add(CONFIG, "must be an object", tensor="quantization_config")
    return tuple(claims)


@dataclass(slots=True)
class _Reader:
    """Turns one JSON object into claims. `values` is untrusted; everything wrong with it lands in `problems`."""

    file: str
    values: JsonObject
    problems: ProblemLog

    def embedded(self) -> QuantClaims:
        """config.json's quantization_config, told apart by quant_method."""
        method = self.values.get("quant_method")
        if method == "compressed-tensors":
            return self._claims(*self._groups())
        if method == "modelopt" or "quant_algo" in self.values:
            return self.modelopt()
        return self._claims(Setting(str(method), None), {}, ())

    def modelopt(self) -> QuantClaims:
        layers = self.values.get("quantized_layers")
        algorithm = self.values.get("quant_algo")
        if algorithm != MIXED:
            named, patterns = self._layers(layers) if layers else ({}, ())
            return self._claims(self._setting(algorithm), named, patterns)
        if layers is None and "config_groups" in self.values:
            _, named, patterns = self._groups()
            return self._claims(None, named, patterns)
        return self._claims(None, *self._layers(layers))

    def _claims(
        self, default: Setting | None, named: Mapping[str, Setting], patterns: tuple[tuple[Pattern, Setting], ...]
    ) -> QuantClaims:
        names, globs = self._split(self._strings("exclude_modules") + self._strings("ignore"), "exclude_modules")
        return QuantClaims(self.file, default, named, patterns, names, globs, self._kv())

    def _setting(self, algorithm: Any) -> Setting:
        if algorithm is None or algorithm == "":
            return UNQUANTIZED
        word = str(algorithm)[:60]
        return Setting(word, ALGORITHMS.get(word.upper()))

    def _layers(self, layers: Any) -> tuple[dict[str, Setting], tuple[tuple[Pattern, Setting], ...]]:
        """quantized_layers: module name or wildcard -> {"quant_algo": ...}."""
        if not isinstance(layers, dict) or len(layers) > MAX_ENTRIES:
            self.problems.add(self.file, "must map module names to settings", tensor="quantized_layers")
            return {}, ()
        settings = {}
        for name, value in layers.items():
            if isinstance(value, dict):
                settings[name] = self._setting(value.get("quant_algo"))
            else:
                self.problems.add(self.file, "must hold a quant_algo", tensor=f"quantized_layers.{name}")
        return self._by_target(settings)

    def _groups(self) -> tuple[Setting | None, dict[str, Setting], tuple[tuple[Pattern, Setting], ...]]:
        """config_groups: each gives targets and a number format."""
        groups = self.values.get("config_groups")
        if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
            self.problems.add(self.file, "must map group names to groups", tensor="config_groups")
            return None, {}, ()
        default: Setting | None = None
        settings: dict[str, Setting] = {}
        for name, group in groups.items():
            setting = _group_setting(group.get("weights"))
            targets = group.get("targets")
            if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
                self.problems.add(self.file, "must be a list of strings", tensor=f"config_groups.{name}.targets")
                continue
            if "Linear" in targets:
                default = setting
            settings |= {target: setting for target in targets if target != "Linear"}
        return default, *self._by_target(settings)

    def _by_target(
        self, settings: Mapping[str, Setting]
    ) -> tuple[dict[str, Setting], tuple[tuple[Pattern, Setting], ...]]:
        names, patterns = self._split(list(settings), "targets")
        return (
            {name: settings[name] for name in settings if name in names},
            tuple((pattern, settings[pattern.text]) for pattern in patterns),
        )

    def _split(self, items: Sequence[str], key: str) -> tuple[frozenset[str], tuple[Pattern, ...]]:
        """Plain names and patterns."""
        names = frozenset(item for item in items if not _is_pattern(item))
        texts = [item for item in items if _is_pattern(item)]
        if len(texts) > MAX_PATTERNS:
            self.problems.add(self.file, f"{len(texts)} patterns; at most {MAX_PATTERNS} are read", tensor=key)
        patterns = []
        for text in texts[:MAX_PATTERNS]:
            matches = _compile(text)
            if matches is None:
                self.problems.add(self.file, f"cannot be used as a pattern: {text[:60]!r}", tensor=key)
            else:
                patterns.append(Pattern(text, matches))
        return names, tuple(patterns)

    def _strings(self, key: str) -> list[str]:
        value = self.values.get(key)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            self.problems.add(self.file, "must be a list of strings", tensor=key)
            return []
        return value

    def _kv(self) -> KvClaim | None:
        """ModelOpt's own file has kv_cache_quant_algo, config.json has kv_cache_scheme; null is a claim, too."""
        for key in ("kv_cache_quant_algo", "kv_cache_scheme"):
            if key in self.values:
                return self._kv_claim(key, self.values[key])
        return None

    def _kv_claim(self, key: str, value: Any) -> KvClaim:
        if value is None or value == "":
            return KvClaim(KvScheme.UNQUANTIZED, self.file, f"{key} is null")
        if isinstance(value, dict):
            is_fp8 = value.get("num_bits") == 8 and value.get("type") == "float" and not value.get("dynamic")
            scheme = KvScheme.FP8 if is_fp8 and value.get("strategy") in (None, "tensor") else None
        else:
            scheme = KV_ALGORITHMS.get(str(value).upper())
        if scheme is None:
            self.problems.add(self.file, f"unsupported KV cache scheme {str(value)[:80]}; supported: FP8", tensor=key)
        return KvClaim(scheme, self.file, f"{key} is {value if isinstance(value, str) else 'float8'}")


def _group_setting(weights: Any) -> Setting:
    """A compressed-tensors number format as one of our schemes."""
    if not isinstance(weights, dict):
        return Setting("a group without weights", None)
    bits, kind, strategy = weights.get("num_bits"), weights.get("type"), weights.get("strategy")
    group_size = weights.get("group_size")
    if (bits, kind, group_size) == (4, "float", 16):
        return Setting("NVFP4", Scheme.NVFP4)
    if (bits, kind) == (8, "float") and strategy in (None, "tensor") and group_size is None:
        return Setting("FP8", Scheme.FP8)
    words = f"{kind}{bits}" + (f" per {strategy}" if strategy else "") + (f" of {group_size}" if group_size else "")
    return Setting(words[:60], None)


# ---- patterns
#
# fnmatch's translation is safe against long matching times; a regular expression out of a config is not. So only
# expressions without nested repetition, and with few repetitions in all, are accepted.

_REPEATED_GROUP = re.compile(r"\)[*+{]")
_MAX_REPETITIONS = 6


def _is_pattern(item: str) -> bool:
    return item.startswith("re:") or any(char in item for char in "*?[")


def _compile(text: str) -> Callable[[str], object] | None:
    """A matcher of whole names, or None when `text` is no usable pattern."""
    if len(text) > MAX_PATTERN_LENGTH:
        return None
    if not text.startswith("re:"):
        return re.compile(fnmatch.translate(text)).match
    expression = text[3:]
    if _REPEATED_GROUP.search(expression) or sum(expression.count(char) for char in "*+{") > _MAX_REPETITIONS:
        return None
    try:
        return re.compile(expression).match
    except (re.error, RecursionError, OverflowError):
        return None
