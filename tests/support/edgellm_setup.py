"""A bundle folder as the vendor's builder leaves it, and an engine over the fake native module."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

import edgellm_worker
from edgellm_worker.engine.api import Engine, FinishReason, GenerationRequest, RowUpdate, SamplingParams, StepReport
from edgellm_worker.engine.edgellm.open import EdgeLlmOptions, open_bundle
from tests.support.fake_edgellm import Behaviour, make_module

MODEL_DIR = Path(edgellm_worker.__file__).parent / "data" / "tiny-qwen3.5-mtp"
TOKENIZER = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
EOS = 2
VOCAB_SIZE = 8192


def tokens_of(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text, add_special_tokens=False).ids)


def count_tokens(text: str) -> int:
    return len(tokens_of(text))


def write_bundle(path: Path, *, num_drafts: int = 3, **built: Any) -> Path:
    """`built` overrides builder_config; `kv` and `draft_kv` the KV dtypes; `bindings` the base's weight bindings."""
    path.mkdir(parents=True, exist_ok=True)
    kv, draft_kv = built.pop("kv", "fp8"), built.pop("draft_kv", built.get("kv", "fp8"))
    bindings, draft_bindings = built.pop("bindings", []), built.pop("draft_bindings", [])
    builder = {"max_input_len": 256, "max_kv_cache_capacity": 512, "max_batch_size": 4, **built}
    base = {
        "engine_role": "base" if num_drafts else "llm",
        "spec_decode_type": "mtp" if num_drafts else "none",
        "vocab_size": VOCAB_SIZE,
        "kv_cache_dtype": kv,
        "builder_config": builder,
        "checkpoint_weight_bindings": bindings,
        "checkpoint_identity": {"version": 1},
    }
    if not num_drafts:
        (path / "llm.engine").touch()
        (path / "config.json").write_text(json.dumps(base))
        return path
    builder.setdefault("max_verify_tree_size", num_drafts + 1)
    draft_size = builder.pop("max_draft_tree_size", num_drafts)
    draft = {
        "engine_role": "draft",
        "kv_cache_dtype": draft_kv,
        "builder_config": {"max_draft_tree_size": draft_size},
        "checkpoint_weight_bindings": draft_bindings,
    }
    for name, config in (("base", base), ("draft", draft)):
        (path / f"spec_{name}.engine").touch()
        (path / f"{name}_config.json").write_text(json.dumps(config))
    return path


def open_fake(bundle_dir: Path, behaviour: Behaviour, values: Any = None, **options: Any) -> Engine:
    return open_bundle(EdgeLlmOptions(bundle_dir, MODEL_DIR, **options), make_module(behaviour, values))


def job(text: str, max_new_tokens: int = 16, **sampling: Any) -> GenerationRequest:
    return GenerationRequest(tokens_of(text), max_new_tokens, SamplingParams(**sampling), frozenset({EOS}))


class Collected:
    """The answers of all rows, as a caller would put them together."""

    def __init__(self) -> None:
        self.reports: list[StepReport] = []
        self.updates: dict[int, list[RowUpdate]] = {}

    def take(self, report: StepReport) -> None:
        self.reports.append(report)
        row_ids = [update.row_id for update in report.updates]
        assert len(row_ids) == len(set(row_ids)), "one update per row and step"
        for update in report.updates:
            told = self.updates.setdefault(update.row_id, [])
            assert not told or told[-1].finish_reason is None, "nothing after the end"
            told.append(update)

    def tokens(self, row_id: int) -> list[int]:
        return [token for update in self.updates[row_id] for token in update.token_ids]

    def finish(self, row_id: int) -> FinishReason | None:
        return self.updates[row_id][-1].finish_reason

    def error(self, row_id: int) -> str | None:
        return self.updates[row_id][-1].error

    def accepted(self, row_id: int) -> list[int]:
        return [update.num_accepted for update in self.updates[row_id] if update.num_drafted]


def run_all(engine: Engine, jobs: dict[int, GenerationRequest] | None = None) -> Collected:
    for row_id, request in (jobs or {}).items():
        engine.add(row_id, request)
    collected = Collected()
    for _ in range(2000):
        if engine.num_rows == 0:
            return collected
        collected.take(engine.step())
    raise AssertionError("the engine does not come to an end")
