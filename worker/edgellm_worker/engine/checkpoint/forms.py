"""How a linear module can be stored, told by the names and dtypes of its tensors and by nothing else.

    form                  weight          weight_scale   global scale          value
    plain                 weight BF16..   -              -                     w
    FP8 per tensor        weight E4M3     []             -                     e4m3 * weight_scale
    NVFP4, ModelOpt       weight U8       E4M3 [o,i/16]  weight_scale_2        e2m1 * (weight_scale * weight_scale_2)
    NVFP4, compr.-tensors weight_packed   E4M3 [o,i/16]  weight_global_scale   e2m1 * (weight_scale * (1 / global))

So a global scale is a reciprocal exactly when it is called weight_global_scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from edgellm_worker.engine.checkpoint.dtypes import DENSE_DTYPES
from edgellm_worker.engine.checkpoint.problems import ProblemLog
from edgellm_worker.engine.checkpoint.quantization import SUPPORTED, Scheme
from edgellm_worker.engine.checkpoint.shard import TensorEntry

BLOCK = 16  # input elements under one NVFP4 block scale


@dataclass(frozen=True, slots=True)
class Form:
    """`scalars` must be there, `optional` may; both hold one number. `is_reciprocal`: they are stored as 1/x."""

    name: str
    scheme: Scheme
    weight: str
    weight_dtypes: frozenset[str]
    block_scale: str | None = None
    scalars: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    is_reciprocal: bool = False

    @property
    def required(self) -> tuple[str, ...]:
        return (*(() if self.block_scale is None else (self.block_scale,)), *self.scalars)


PLAIN = Form("plain", Scheme.DENSE, "weight", DENSE_DTYPES)
FP8 = Form("FP8 per tensor", Scheme.FP8, "weight", frozenset({"F8_E4M3"}), None, ("weight_scale",), ("input_scale",))
NVFP4_MODELOPT = Form(
    "NVFP4 (ModelOpt)", Scheme.NVFP4, "weight", frozenset({"U8"}), "weight_scale", ("weight_scale_2",), ("input_scale",)
)
NVFP4_COMPRESSED = Form(
    name="NVFP4 (compressed-tensors)",
    scheme=Scheme.NVFP4,
    weight="weight_packed",
    weight_dtypes=frozenset({"U8"}),
    block_scale="weight_scale",
    scalars=("weight_global_scale",),
    optional=("input_global_scale",),
    is_reciprocal=True,
)
FORMS = (PLAIN, FP8, NVFP4_MODELOPT, NVFP4_COMPRESSED)

# Tensors that give away a scheme which is not supported.
FOREIGN_LEAVES: Mapping[str, str] = {
    "qweight": "AWQ or GPTQ",
    "pre_quant_scale": "AWQ (pre_quant_scale)",
    "weight_scale_inv": "FP8 in blocks (weight_scale_inv)",
    "weight_zero_point": "integer quantization with zero points",
    "weight_shape": "compressed-tensors pack-quantized integers",
    "SCB": "bitsandbytes int8",
    "absmax": "bitsandbytes 4 bit",
}

# Block scales that are powers of two, whatever the elements are.
MX_SCALE_DTYPES = frozenset({"U8", "F8_E8M0"})

# What may stand beside a weight without saying how it is stored.
OTHER_LEAVES = frozenset({"k_scale", "v_scale", "bias"})
WEIGHT_LEAVES = ("weight", "weight_packed", "qweight")


def find_form(module: str, tensors: Mapping[str, TensorEntry], problems: ProblemLog) -> Form | None:
    """The form of a module that has a weight, or None with the reason in `problems`."""
    weight = next(tensors[leaf] for leaf in WEIGHT_LEAVES if leaf in tensors)
    foreign = next((word for leaf, word in FOREIGN_LEAVES.items() if leaf in tensors), None)
    if "weight_scale" in tensors and tensors["weight_scale"].dtype in MX_SCALE_DTYPES:
        foreign = "MXFP8" if weight.dtype == "F8_E4M3" else "MXFP4"
    if foreign is not None:
        problems.add(weight.file, f"unsupported scheme: {foreign}; {SUPPORTED}", tensor=weight.name)
        return None
    leaf = weight.name.rpartition(".")[2]
    form = next((form for form in FORMS if form.weight == leaf and weight.dtype in form.weight_dtypes), None)
    if form is None:
        message = f"unsupported scheme: {leaf} stored as {weight.dtype}; {SUPPORTED}"
        problems.add(weight.file, message, tensor=weight.name)
        return None
    return form if _has_sidecars(form, module, weight, tensors, problems) else None


def _has_sidecars(
    form: Form, module: str, weight: TensorEntry, tensors: Mapping[str, TensorEntry], problems: ProblemLog
) -> bool:
    """Exactly the sidecars of the form, in its dtypes: a weight is never read without its scale, nor with another's."""
    missing = [leaf for leaf in form.required if leaf not in tensors]
    for leaf in missing:
        message = f"{form.name}: {weight.dtype} weight without {leaf} beside it ({module}.{leaf})"
        problems.add(weight.file, message, tensor=weight.name)
    known = {form.weight, *form.required, *form.optional, *OTHER_LEAVES}
    foreign = sorted(tensors.keys() - known)
    for leaf in foreign:
        entry = tensors[leaf]
        problems.add(entry.file, f"left over: a {form.name} weight has no {leaf}", tensor=entry.name)
    return not missing and not foreign


def check_shapes(form: Form, shape: tuple[int, ...], tensors: Mapping[str, TensorEntry], problems: ProblemLog) -> bool:
    """`shape` is [out, in] as the architecture wants it. Every tensor of the module is checked."""
    num_before = len(problems)
    num_out, num_in = shape
    if form.block_scale is None:
        _check(tensors[form.weight], shape, form.weight_dtypes, problems)
    else:
        if num_in % BLOCK:
            entry = tensors[form.weight]
            problems.add(entry.file, f"{num_in} inputs are no multiple of the block of {BLOCK}", tensor=entry.name)
            return False
        _check(tensors[form.weight], (num_out, num_in // 2), form.weight_dtypes, problems)
        _check(tensors[form.block_scale], (num_out, num_in // BLOCK), frozenset({"F8_E4M3"}), problems)
    for leaf in (*form.scalars, *form.optional):
        if leaf in tensors:
            check_scalar(tensors[leaf], problems)
    return len(problems) == num_before


def check_scalar(entry: TensorEntry, problems: ProblemLog) -> bool:
    """One number: [] or [1]. A vector here is another scheme (per channel, in blocks), named as such."""
    num_before = len(problems)
    if entry.num_elements != 1:
        message = f"unsupported scheme: scale of shape {list(entry.shape)}, one per tensor is supported; {SUPPORTED}"
        problems.add(entry.file, message, tensor=entry.name)
    elif entry.dtype not in DENSE_DTYPES:
        problems.add(entry.file, f"wrong dtype {entry.dtype} of a scale", tensor=entry.name)
    return len(problems) == num_before


def check_plain(entry: TensorEntry, shape: tuple[int, ...], problems: ProblemLog) -> bool:
    """A tensor that is never quantized: norms, convolutions, embeddings."""
    num_before = len(problems)
    _check(entry, shape, DENSE_DTYPES, problems)
    return len(problems) == num_before


def _check(entry: TensorEntry, shape: tuple[int, ...], dtypes: frozenset[str], problems: ProblemLog) -> None:
    if entry.dtype not in dtypes:
        wanted = ", ".join(sorted(dtypes))
        problems.add(entry.file, f"wrong dtype {entry.dtype}, must be {wanted}", tensor=entry.name)
    if entry.shape != shape:
        problems.add(entry.file, f"wrong shape {list(entry.shape)}, must be {list(shape)}", tensor=entry.name)
