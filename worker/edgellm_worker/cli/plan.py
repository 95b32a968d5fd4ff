"""`edgellm-worker plan MODEL`: device memory of the tensorrt engine over batch sizes and draft lengths, before a build.

Needs no GPU. With a budget, or on a machine with a GPU, what does not fit is marked, and a requested size that does not
fit ends with exit code 2.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from edgellm_worker.cli.options import add_settings, given_flags
from edgellm_worker.config import load_settings
from edgellm_worker.engine.build.choice import absent_forms, stored_forms, trees_of
from edgellm_worker.engine.build.plan import PlanRow, plan_grid, verify_state_bytes_per_position
from edgellm_worker.engine.build.spec import EngineSpec
from edgellm_worker.engine.checkpoint.checkpoint import open_checkpoint
from edgellm_worker.engine.checkpoint.quantization import KvScheme
from edgellm_worker.engine.demands import KvCacheDtype, WeightForm
from edgellm_worker.engine.errors import EngineFault
from edgellm_worker.engine.models.registry import read_model
from edgellm_worker.engine.ops.api import KvDtype
from edgellm_worker.engine.runtime.cuda import Cuda
from edgellm_worker.engines import engine_options
from edgellm_worker.errors import ConfigError, ExitCode

FIELDS = (
    "quantization",
    "kv_cache_dtype",
    "speculative_config",
    "max_batch_size",
    "max_kv_cache_capacity",
    "max_verify_tree_size",
    "max_draft_tree_size",
)
_GIB = float(1 << 30)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="checkpoint folder")
    parser.add_argument(
        "--budget-gib", type=float, metavar="N", help="memory to fit into (default: this machine's GPU, if any)"
    )
    parser.add_argument("--decode-weights", action="store_true", help="as --quantization float16")
    parser.add_argument("--json", action="store_true", help="print the table as JSON, in bytes")
    add_settings(parser, FIELDS)


def run(arguments: argparse.Namespace, environment: Mapping[str, str]) -> int:
    settings, _ = load_settings(given_flags(arguments), environment)
    budget = _budget_bytes(arguments.budget_gib)
    checkpoint = open_checkpoint(settings.model_dir, read_values=False)
    model = read_model(checkpoint.model_config, checkpoint.base, checkpoint.draft)
    trees = trees_of(model, engine_options(settings))
    wanted = trees.max_verify_tree_size - 1
    is_decoded = arguments.decode_weights or WeightForm.FLOAT16 in settings.quantization
    spec = EngineSpec(
        max_batch_size=settings.max_batch_size,
        max_kv_cache_capacity=min(settings.max_kv_cache_capacity, model.config.max_positions),
        max_verify=trees.max_verify_tree_size,
        kv_dtype=_kv_dtype(checkpoint.base.kv.scheme, settings.kv_cache_dtype),
        runs_fp8=not is_decoded,
        runs_fp4=not is_decoded,
        packs=not is_decoded,
    )
    wishes = settings.quantization - {WeightForm.FLOAT16}
    if wishes and (problems := absent_forms(wishes, stored_forms(model, spec))):
        raise ConfigError(problems)
    batches = sorted({1, 2, 4, 8, spec.max_batch_size})
    drafts = sorted({0, 1, 3, 5, wanted}) if model.mtp is not None else [0]
    rows = plan_grid(model, spec, batches, drafts)
    single, kept = (verify_state_bytes_per_position(model, spec, copies=copies) for copies in (1, 2))
    if arguments.json:
        state = {"one_copy": single, "as_kept": kept}
        document = {"budget_bytes": budget, "verify_state_bytes_per_position": state, "rows": list(map(asdict, rows))}
        sys.stdout.write(json.dumps(document, indent=1) + "\n")
    else:
        sys.stdout.write(table(rows, budget))
        sys.stdout.write(
            f"a verify position costs {single / 1e6:.2f} MB of state over {spec.max_batch_size} rows, one copy"
            f" ({kept / 1e6:.2f} MB as kept, k and log g twice)\n"
        )
    if spec.max_kv_cache_capacity < settings.max_kv_cache_capacity:
        sys.stderr.write(f"the model has {spec.max_kv_cache_capacity} positions: no row gets more of the cache\n")
    chosen = next(row for row in rows if (row.max_batch_size, row.num_drafts) == (spec.max_batch_size, wanted))
    if budget is not None and chosen.memory.total_bytes > budget:
        sys.stderr.write(
            f"edgellm-worker: {spec.max_batch_size} rows with {wanted} drafts need"
            f" {chosen.memory.total_bytes / _GIB:.2f} GiB, there are {budget / _GIB:.2f}\n"
        )
        return ExitCode.OPERATOR
    return ExitCode.DONE


def _kv_dtype(scheme: KvScheme, wanted: KvCacheDtype) -> KvDtype:
    if wanted is not KvCacheDtype.AUTO:
        return KvDtype(wanted.value)
    return KvDtype.FP8 if scheme is KvScheme.FP8 else KvDtype.FLOAT16


def table(rows: Sequence[PlanRow], budget: float | None) -> str:
    """GiB per kind, one line per batch size and draft length."""
    kinds = ("weights", "kv_cache", "recurrent_state", "pending", "workspace")
    lines = ["batch drafts " + " ".join(f"{kind:>15s}" for kind in kinds) + f" {'total':>8s}"]
    for row in rows:
        sizes = " ".join(f"{getattr(row.memory, f'{kind}_bytes') / _GIB:15.3f}" for kind in kinds)
        fits = "" if budget is None or row.memory.total_bytes <= budget else "  does not fit"
        lines.append(f"{row.max_batch_size:5d} {row.num_drafts:6d} {sizes} {row.memory.total_bytes / _GIB:8.3f}{fits}")
    note = "GiB; total includes 0.5 for the library and its kernels"
    if budget is not None:
        note += f"; budget {budget / _GIB:.2f}"
    return "\n".join([*lines, note]) + "\n"


def _budget_bytes(budget_gib: float | None) -> float | None:
    """What was asked for, else the GPU's free memory, else nothing to compare with. Raises `ConfigError`."""
    if budget_gib is not None:
        if not 0 < budget_gib < math.inf:
            raise ConfigError([f"--budget-gib: {budget_gib} is not a positive number"])
        return budget_gib * _GIB
    try:
        with Cuda() as cuda:
            return cuda.memory()[0]
    except EngineFault:
        return None
