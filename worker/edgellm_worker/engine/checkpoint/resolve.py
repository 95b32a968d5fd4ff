"""From names to typed weights: which tensors each part of the model is made of, and what decided that.

Three rules, in this order.

Namespace rule. A module is where its weight is. Its sidecars and its quantization setting are looked up in that
namespace only, so a BF16 `mtp.layers.0.mlp.down_proj` never meets the scales of `model.layers.0.mlp.down_proj`.

Bare-weight rule. A floating-point weight with no sidecar in its namespace is unquantized, whatever a config says.

Contradiction. Any other difference between a config's claim and the files is a problem that names the tensor. One
claim is weaker: a model-wide default speaks of the base. A draft that no entry names is what its own tensors are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from edgellm_worker.engine.checkpoint.forms import (
    OTHER_LEAVES,
    WEIGHT_LEAVES,
    Form,
    check_plain,
    check_shapes,
    find_form,
)
from edgellm_worker.engine.checkpoint.layout import FUSED, Namespace, Part
from edgellm_worker.engine.checkpoint.names import PREFIXES, Module, ModuleName, NameTable
from edgellm_worker.engine.checkpoint.problems import ProblemLog
from edgellm_worker.engine.checkpoint.quantization import SUPPORTED, Claim, ClaimKind, QuantClaims, Scheme
from edgellm_worker.engine.checkpoint.shard import TensorEntry


@dataclass(frozen=True, slots=True)
class LinearSource:
    """One linear module of the model. `rows` is the part of a fused module's rows; `decided_by` a file's name."""

    part: Part
    form: Form
    tensors: Mapping[str, TensorEntry]
    rows: slice
    stored_as: str
    decided_by: str
    claimed: str | None

    @property
    def scheme(self) -> Scheme:
        return self.form.scheme


@dataclass(frozen=True, slots=True)
class ArraySource:
    """One tensor that is never quantized."""

    part: Part
    tensor: TensorEntry


@dataclass(slots=True)
class Resolution:
    """What the resolver found. `used` are names of tensors that belong to something."""

    linears: dict[tuple[Namespace, str], LinearSource] = field(default_factory=dict)
    arrays: dict[tuple[Namespace, str], ArraySource] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)


@dataclass(slots=True)
class Resolver:
    """`parts` is all that the model consists of; `missing_file` is where an absent tensor is reported."""

    parts: Mapping[tuple[Namespace, str], Part]
    names: NameTable
    claims: Sequence[QuantClaims]
    unreadable: frozenset[str]
    missing_file: str
    problems: ProblemLog
    result: Resolution = field(default_factory=Resolution)
    _forms: dict[tuple[Namespace, str], Form | None] = field(default_factory=dict)
    _remarks: dict[str, list[str]] = field(default_factory=dict)
    _refused: set[tuple[str, str]] = field(default_factory=set)

    def resolve_all(self) -> Resolution:
        for part in self.parts.values():
            if part.is_linear:
                self._linear(part)
            else:
                self._array(part)
        return self.result

    def notes(self) -> list[str]:
        """What was decided against a claim, said once per kind."""
        return [f"{len(names)} modules {remark} (first: {names[0]})" for remark, names in self._remarks.items()]

    def _array(self, part: Part) -> None:
        module, _, leaf = part.name.rpartition(".")
        entry = self.names.find(part.namespace, module, leaf)
        if entry is None:
            self._missing(part.namespace, part.name)
            return
        self.result.used.add(entry.name)
        if check_plain(entry, part.shape, self.problems):
            self.result.arrays[part.namespace, part.name] = ArraySource(part, entry)

    def _linear(self, part: Part) -> None:
        module = self._module(part.namespace, part.name)
        if module is not None:
            self._use(part, module, part.shape, slice(0, part.shape[0]))
        elif not self._fused(part):
            self._missing(part.namespace, f"{part.name}.weight")

    def _module(self, namespace: Namespace, name: str) -> Module | None:
        """The module of that name if it has a weight of its own."""
        module = self.names.modules.get((namespace, name))
        has_weight = module is not None and any(leaf in module.tensors for leaf in WEIGHT_LEAVES)
        return module if has_weight else None

    def _fused(self, part: Part) -> bool:
        """Whether a fused module holds this part; it is then resolved as some of that module's rows."""
        for fused, members in FUSED.items():
            member = next((member for member in members if part.name.endswith(f".{member}")), None)
            if member is None:
                continue
            prefix = part.name.removesuffix(member)
            module = self._module(part.namespace, prefix + fused)
            if module is None:
                return False
            sizes = [self.parts[part.namespace, prefix + name].shape[0] for name in members]
            start = sum(sizes[: members.index(member)])
            self._use(part, module, (sum(sizes), part.shape[1]), slice(start, start + part.shape[0]))
            return True
        return False

    def _use(self, part: Part, module: Module, shape: tuple[int, ...], rows: slice) -> None:
        """`shape` is the stored module's, of which `part` is the `rows`."""
        self.result.used.update(entry.name for leaf, entry in module.tensors.items() if leaf not in OTHER_LEAVES)
        form = self._form(module, shape)
        if form is None:
            return
        weight = module.tensors[form.weight]
        claim = self._claim(module.name)
        self.result.linears[part.namespace, part.name] = LinearSource(
            part=part,
            form=form,
            tensors=module.tensors,
            rows=rows,
            stored_as=weight.name,
            decided_by=self._decide(module.name, weight, form, claim),
            claimed=None if claim is None else claim.setting.algorithm,
        )

    def _form(self, module: Module, shape: tuple[int, ...]) -> Form | None:
        """The module's form, checked once however many parts share it."""
        key = (module.name.namespace, module.name.name)
        if key not in self._forms:
            form = find_form(module.name.name, module.tensors, self.problems)
            is_sound = form is not None and check_shapes(form, shape, module.tensors, self.problems)
            self._forms[key] = form if is_sound else None
        return self._forms[key]

    def _claim(self, name: ModuleName) -> Claim | None:
        """The strongest config that speaks of this module wins; the others are heard to say whether they agree."""
        said = [claim for claims in self.claims if (claim := claims.of(name.aliases)) is not None]
        for other in said[1:]:
            if other.setting.scheme is not said[0].setting.scheme:
                remark = f"on which {said[0].file} and {other.file} disagree: {said[0].file} wins"
                self._remarks.setdefault(remark, []).append(
                    f"{name.found_as}{name.name}: {said[0].setting.algorithm} over {other.setting.algorithm}"
                )
        return said[0] if said else None

    def _decide(self, name: ModuleName, weight: TensorEntry, form: Form, claim: Claim | None) -> str:
        """Hold the claim against the form that was found; the name of the file that settled it."""
        if claim is None:
            return weight.file
        setting = claim.setting
        if setting.scheme is form.scheme:
            return claim.file
        if form.scheme is Scheme.DENSE:
            remark = f"of {name.namespace}, claimed {setting.algorithm}, are stored plain and read as unquantized"
        elif claim.kind is ClaimKind.DEFAULT and name.namespace is Namespace.MTP:
            remark = f"of mtp are stored as {form.scheme}, not as the model-wide {setting.algorithm}: the files decide"
        else:
            self._contradiction(weight, form, claim)
            return weight.file
        self._remarks.setdefault(remark, []).append(weight.name)
        return weight.file

    def _contradiction(self, weight: TensorEntry, form: Form, claim: Claim) -> None:
        if claim.setting.scheme is not None:
            message = f"{claim.file} says {claim.setting.algorithm} ({claim.kind}), the tensors are {form.name}"
            self.problems.add(weight.file, message, tensor=weight.name)
            return
        key = (claim.file, claim.setting.algorithm)
        if key not in self._refused:
            self._refused.add(key)
            message = f"unsupported algorithm {claim.setting.algorithm}, first seen here; {SUPPORTED}"
            self.problems.add(claim.file, message, tensor=weight.name)

    def _missing(self, namespace: Namespace, name: str) -> None:
        """A tensor that exists but cannot be read was reported where it was read."""
        spellings = [prefix + name for prefix in PREFIXES[namespace]]
        if self.unreadable.isdisjoint(spellings):
            self.problems.add(self.missing_file, "missing tensor", tensor=self.names.spell(namespace, name))
