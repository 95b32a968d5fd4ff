"""From a tensor's name in the files to its namespace and its name inside it.

The draft shares short names with the base, so a name is never looked up without its namespace, and nothing falls back
from one namespace to the other: a module's sidecars and its quantization setting are sought where its weight is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from edgellm_worker.engine.checkpoint.layout import Namespace
from edgellm_worker.engine.checkpoint.problems import ProblemLog
from edgellm_worker.engine.checkpoint.shard import TensorEntry

# Longest first within each namespace: "model." is a prefix of the others.
PREFIXES: Mapping[Namespace, tuple[str, ...]] = {
    Namespace.MTP: ("model.language_model.mtp.", "language_model.mtp.", "model.mtp.", "mtp."),
    Namespace.BASE: ("model.language_model.", "language_model.model.", "language_model.", "model.", ""),
}

# Parts of multimodal checkpoints that this product does not run; listed by `inspect`, never an error.
VISION_PREFIXES = ("model.visual.", "visual.", "model.vision_tower.", "vision_tower.", "model.multi_modal_projector.")

# Buffers that older exports carry and that are computed from the config instead.
COMPUTED_SUFFIXES = (".rotary_emb.inv_freq",)


@dataclass(frozen=True, slots=True)
class ModuleName:
    """A module as the resolver knows it; `found_as` is the prefix under which the files hold it."""

    namespace: Namespace
    name: str
    found_as: str

    @property
    def aliases(self) -> tuple[str, ...]:
        """The spellings that a config may use for this module, the files' own first; all of one namespace.

        Other prefixes are tried for the base's layers only. `model.mtp.x` for a draft found as `mtp.x`, or
        `model.lm_head` for `lm_head`, would let an entry that means the base (`model.*`) take in other modules.
        """
        prefixes: tuple[str, ...]
        if self.namespace is Namespace.MTP:
            prefixes = (self.found_as, "mtp.")
        elif self.name == "lm_head":
            prefixes = (self.found_as, "")
        else:
            prefixes = (self.found_as, *PREFIXES[self.namespace])
        return tuple(dict.fromkeys(prefix + self.name for prefix in prefixes))


def split_prefix(name: str) -> tuple[Namespace, str, str]:
    """(namespace, prefix, rest). Every name has one: the base's last prefix is empty."""
    for namespace, prefixes in PREFIXES.items():
        for prefix in prefixes:
            if name.startswith(prefix):
                return namespace, prefix, name[len(prefix) :]
    raise AssertionError  # the empty prefix matched


@dataclass(frozen=True, slots=True)
class Module:
    """The tensors of one module by their last name: weight, weight_scale, input_scale, A_log, ..."""

    name: ModuleName
    tensors: Mapping[str, TensorEntry]


@dataclass(frozen=True, slots=True)
class NameTable:
    """All tensors, sorted into modules; what is ignored stands apart."""

    modules: Mapping[tuple[Namespace, str], Module]
    vision: tuple[TensorEntry, ...]
    computed: tuple[TensorEntry, ...]

    def find(self, namespace: Namespace, module: str, leaf: str) -> TensorEntry | None:
        found = self.modules.get((namespace, module))
        return None if found is None else found.tensors.get(leaf)

    def spell(self, namespace: Namespace, name: str) -> str:
        """`name` with the prefix that this checkpoint uses for the namespace's layers."""
        own = (module.name for module in self.modules.values() if module.name.namespace is namespace)
        layer = next((module for module in own if module.name.startswith("layers.")), None)
        default = "mtp." if namespace is Namespace.MTP else "model."
        prefix = "" if name.startswith("lm_head") else default
        return (layer.found_as if layer is not None and prefix else prefix) + name

    def has_any(self, namespace: Namespace) -> bool:
        return any(key[0] is namespace for key in self.modules)


def sort_names(tensors: Mapping[str, TensorEntry], problems: ProblemLog) -> NameTable:
    """Two spellings of one tensor (`model.x` and `model.language_model.x`) are a problem: neither is the right one."""
    vision, computed = [], []
    leaves: dict[tuple[Namespace, str], dict[str, TensorEntry]] = {}
    prefixes: dict[tuple[Namespace, str], str] = {}
    for name, entry in tensors.items():
        if name.startswith(VISION_PREFIXES):
            vision.append(entry)
            continue
        if name.endswith(COMPUTED_SUFFIXES):
            computed.append(entry)
            continue
        namespace, prefix, rest = split_prefix(name)
        module, _, leaf = rest.rpartition(".")
        held = leaves.setdefault((namespace, module), {})
        prefixes.setdefault((namespace, module), prefix)
        if leaf in held:
            problems.add(entry.file, f"the same tensor as {held[leaf].name} of {held[leaf].file}", tensor=name)
        else:
            held[leaf] = entry
    modules = {key: Module(ModuleName(key[0], key[1], prefixes[key]), tensors) for key, tensors in leaves.items()}
    return NameTable(modules, tuple(vision), tuple(computed))
