"""`build --engine edgellm`: the vendor's builder in a child, its cache, its correction, and the audit of what it built."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

import edgellm_worker
from edgellm_worker.engine.checkpoint.checkpoint import open_checkpoint
from edgellm_worker.engine.checkpoint.digest import content_digest
from edgellm_worker.engine.checkpoint.quantization import Scheme
from edgellm_worker.engine.demands import KvCacheDtype, WeightForm
from edgellm_worker.engine.edgellm.audit import audit
from edgellm_worker.engine.edgellm.builder import build_bundle, builder_argv
from edgellm_worker.engine.edgellm.bundle import read_bundle
from edgellm_worker.engine.edgellm.cache import BuildOptions, BuildWorld, bundle_key
from edgellm_worker.engine.edgellm.command import build, describe
from edgellm_worker.engine.edgellm.feedback import Feedback, FeedbackCorrection
from edgellm_worker.engine.edgellm.misread import ModelFacts
from edgellm_worker.engine.errors import BuildError, CapacityError, CheckpointError, DemandError
from edgellm_worker.engine.load import EngineOptions, build_engine
from edgellm_worker.engine.runtime.speculative_config import SpeculativeConfig
from tests.support import edgellm_checkpoints as ck
from tests.support.edgellm_fake_wheel import BUILDER_FLAGS, told, write_fake_wheel
from tests.support.edgellm_setup import write_bundle

OPTIONS = BuildOptions(num_speculative_tokens=5, max_batch_size=2, max_input_len=128, max_kv_cache_capacity=256)
WORKER = Path(edgellm_worker.__file__).parent.parent


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return use_wheel(tmp_path / "wheel", monkeypatch)


def use_wheel(root: Path, monkeypatch: pytest.MonkeyPatch, **wheel: str) -> Path:
    write_fake_wheel(root, **wheel)
    monkeypatch.syspath_prepend(root)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(root), str(WORKER), str(WORKER.parent / "producer")]))
    return root


@pytest.fixture
def model(tmp_path: Path) -> ModelFacts:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return ModelFacts(folder, {"mtp.fc": Scheme.DENSE}, is_mixed=False, has_fp8_kv=True)


def calls(cache: Path) -> list[list[str]]:
    return [json.loads(line) for log in cache.rglob("calls.log") for line in log.read_text().splitlines()]


def test_it_builds_once_and_says_what_the_correction_did(tmp_path: Path, wheel: Path, model: ModelFacts) -> None:
    cache = tmp_path / "cache"
    first = build_bundle(model, cache, OPTIONS)
    again = build_bundle(model, cache, OPTIONS)
    assert (first.was_cached, again.was_cached) == (False, True)
    assert first.feedback == again.feedback == "corrected"
    assert first.bundle.max_verify_tree_size == 6
    assert first.bundle.max_draft_tree_size == 5
    assert len(calls(cache)) == 1
    draft = json.loads((first.bundle.path / "draft_config.json").read_text())
    assert draft["hidden_states"] == "after the norm"
    assert first.bundle.path.parent.name == "tensorrt-edgellm-0.11.0_tensorrt-10.16.0.72_sm110"
    assert not list(cache.rglob(".building-*"))


def test_the_argv_names_every_size_and_only_flags_that_exist() -> None:
    argv = builder_argv(Path("/m"), Path("/out"), OPTIONS)
    assert set(argv[::2]) <= set(BUILDER_FLAGS)
    told_sizes = dict(zip(argv[::2], argv[1::2], strict=True))
    assert told_sizes["--max-verify-tree-size"] == "6"
    assert told_sizes["--max-draft-tree-size"] == "5"
    assert told_sizes["--spec-type"] == "mtp"
    plain = builder_argv(Path("/m"), Path("/out"), replace(OPTIONS, num_speculative_tokens=0))
    assert plain[plain.index("--spec-type") + 1] == "none"
    assert "--max-verify-tree-size" not in plain


def test_opting_out_of_the_correction_is_another_bundle(tmp_path: Path, wheel: Path, model: ModelFacts) -> None:
    corrected = build_bundle(model, tmp_path / "cache", OPTIONS)
    shipped = build_bundle(model, tmp_path / "cache", replace(OPTIONS, corrects_feedback=False))
    assert shipped.feedback == "as-shipped"
    assert shipped.bundle.path != corrected.bundle.path
    draft = json.loads((shipped.bundle.path / "draft_config.json").read_text())
    assert draft["hidden_states"] == "before the norm"


def test_a_builder_without_the_defect_is_left_alone(
    tmp_path: Path, wheel: Path, model: ModelFacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_EDGELLM", told(defect=False))
    assert build_bundle(model, tmp_path / "cache", OPTIONS).feedback == "already-normed"


def test_a_builder_that_the_correction_does_not_fit_is_refused_by_name(
    tmp_path: Path, model: ModelFacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_wheel(tmp_path / "wheel", monkeypatch, draft_class="Renamed")
    with pytest.raises(BuildError, match="--no-correct-draft-feedback"):
        build_bundle(model, tmp_path / "cache", OPTIONS)


def test_a_plain_bundle_needs_no_correction(tmp_path: Path, wheel: Path, model: ModelFacts) -> None:
    built = build_bundle(model, tmp_path / "cache", replace(OPTIONS, num_speculative_tokens=0))
    assert built.bundle.draft is None
    assert built.feedback == "as-shipped"


def test_drafts_without_an_mtp_layer_are_refused(tmp_path: Path, wheel: Path, model: ModelFacts) -> None:
    with pytest.raises(DemandError, match="has no MTP layer"):
        build_bundle(replace(model, schemes={}), tmp_path / "cache", OPTIONS)


def test_other_versions_and_gpus_have_their_own_folders(
    tmp_path: Path, model: ModelFacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_wheel(tmp_path / "old", monkeypatch)
    old = build_bundle(model, tmp_path / "cache", OPTIONS)
    use_wheel(tmp_path / "new", monkeypatch, tensorrt="11.0.0.114")
    new = build_bundle(model, tmp_path / "cache", OPTIONS)
    assert not new.was_cached
    assert new.bundle.path.parent != old.bundle.path.parent


@pytest.mark.parametrize(
    "change",
    [
        {"num_speculative_tokens": 4},
        {"max_batch_size": 3},
        {"max_input_len": 64},
        {"max_kv_cache_capacity": 512},
        {"corrects_feedback": False},
        {"verify_tree": 8},
        {"draft_tree": 7},
    ],
)
def test_the_key_covers_every_option(change: dict[str, int]) -> None:
    world = BuildWorld("0.11.0", "10.16", "sm110")
    assert bundle_key(world, OPTIONS, "c") != bundle_key(world, replace(OPTIONS, **change), "c")


def test_the_key_covers_world_and_content(tmp_path: Path) -> None:
    world = BuildWorld("0.11.0", "10.16", "sm110")
    keys = [
        bundle_key(w, OPTIONS, c)
        for w, c in [
            (world, "c"),
            (world, "d"),
            (replace(world, gpu="sm87"), "c"),
            (replace(world, package_version="0.12.0"), "c"),
        ]
    ]
    assert all(a != b for i, a in enumerate(keys) for b in keys[:i])
    one = ck.write_checkpoint(tmp_path / "one")
    two = ck.write_checkpoint(tmp_path / "two")
    assert content_digest(one) == content_digest(two)
    raw = bytearray((two / "model.safetensors").read_bytes())
    raw[-1] ^= 1
    (two / "model.safetensors").write_bytes(raw)
    assert content_digest(one) != content_digest(two)


def test_a_crash_shows_the_end_of_its_log(
    tmp_path: Path, wheel: Path, model: ModelFacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_EDGELLM", told(crash="no plugin library"))
    with pytest.raises(BuildError, match=r"exited 1; its log is .*\n(.*\n)*.*no plugin library"):
        build_bundle(model, tmp_path / "cache", OPTIONS)
    assert not list((tmp_path / "cache").rglob("*_config.json"))
    monkeypatch.setenv("FAKE_EDGELLM", told(signal=int(signal.SIGKILL)))
    with pytest.raises(BuildError, match="killed by signal 9"):
        build_bundle(model, tmp_path / "cache", OPTIONS)


def test_a_machine_that_the_vendor_does_not_know_is_told_so(
    tmp_path: Path, wheel: Path, model: ModelFacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_EDGELLM", told(machine=1))
    with pytest.raises(BuildError, match=r"^tensorrt-edgellm does not support this machine: Unknown board$"):
        build_bundle(model, tmp_path / "cache", OPTIONS)


def test_a_foreign_or_damaged_bundle_is_named(tmp_path: Path, wheel: Path, model: ModelFacts) -> None:
    built = build_bundle(model, tmp_path / "cache", OPTIONS)
    manifest = built.bundle.path / "edgellm_worker.json"
    manifest.write_text(json.dumps({"key": {}}))
    with pytest.raises(BuildError, match="built for something else"):
        build_bundle(model, tmp_path / "cache", OPTIONS)
    manifest.unlink()
    with pytest.raises(BuildError, match="damaged bundle"):
        build_bundle(model, tmp_path / "cache", OPTIONS)


def test_a_draft_that_the_vendor_would_misread_is_refused_before_the_build(
    tmp_path: Path, wheel: Path, model: ModelFacts
) -> None:
    mixed = replace(model, schemes={"mtp.layers.0.self_attn.q_proj": Scheme.FP8}, is_mixed=True)
    with pytest.raises(CheckpointError, match="--rewrite-mtp bf16"):
        build_bundle(mixed, tmp_path / "cache", OPTIONS)
    assert calls(tmp_path / "cache") == []
    assert not build_bundle(mixed, tmp_path / "cache", replace(OPTIONS, num_speculative_tokens=0)).was_cached


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        ({"verify": 60}, "max_verify_tree_size: built 60, wanted 6"),
        ({"verify": 4}, "max_verify_tree_size: built 4, wanted 6"),
        ({"kv": "fp16"}, "the vendor built FP16"),
        ({"draft_kv": "fp16"}, "different KV dtypes"),
    ],
)
def test_a_bundle_that_is_not_what_was_asked_for_is_not_kept(
    behaviour: dict[str, object],
    message: str,
    tmp_path: Path,
    wheel: Path,
    model: ModelFacts,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FAKE_EDGELLM", told(**behaviour))
    with pytest.raises(BuildError, match=message):
        build_bundle(model, tmp_path / "cache", OPTIONS)
    assert not list((tmp_path / "cache").rglob("edgellm_worker.json"))


def audited(tmp_path: Path, model: ModelFacts, options: BuildOptions = OPTIONS, **built: object) -> None:
    path = write_bundle(
        tmp_path / "b", num_drafts=5, max_batch_size=2, max_input_len=128, max_kv_cache_capacity=256, **built
    )
    audit(read_bundle(path), options, model)


def test_an_fp16_kv_cache_can_be_accepted(tmp_path: Path, model: ModelFacts) -> None:
    audited(tmp_path, model, replace(OPTIONS, accepts_fp16_kv=True), kv="fp16", draft_kv="fp16")
    with pytest.raises(BuildError, match="the checkpoint asks for fp16"):
        audited(tmp_path, replace(model, has_fp8_kv=False))


def test_quantized_modules_bound_as_unquantized_are_found(tmp_path: Path, model: ModelFacts) -> None:
    name = "mtp.layers.0.self_attn.q_proj"
    binding = {"engine_name": "w0", "checkpoint_keys": [f"{name}.weight"], "source_layout": "fp16", "dtype": "F16"}
    quantized = replace(model, schemes={name: Scheme.FP8})
    audited(tmp_path, replace(model, schemes={name: Scheme.DENSE}), draft_bindings=[binding])
    with pytest.raises(BuildError, match=f"draft: {name}.weight is FP8 and was bound as unquantized"):
        audited(tmp_path, quantized, draft_bindings=[binding])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda b: (b / "spec_draft.engine").unlink(), "spec_draft.engine is missing"),
        (lambda b: (b / "base_config.json").write_text("{"), "base_config.json: "),
        (lambda b: (b / "base_config.json").write_text("[]"), "is no JSON object"),
        (lambda b: (b / "draft_config.json").write_text("{}"), "draft_config.json: kv_cache_dtype is missing"),
    ],
)
def test_incomplete_bundles_are_named(damage: object, message: str, tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "b")
    damage(bundle)  # type: ignore[operator]
    with pytest.raises(BuildError, match=message):
        read_bundle(bundle)


def test_the_command_rewrites_when_asked_and_builds_from_the_copy(tmp_path: Path, wheel: Path) -> None:
    source = ck.write_checkpoint(tmp_path / "m", mtp=ck.fp8, hf_quant=ck.mixed("NVFP4", "FP8"))
    with pytest.raises(CheckpointError, match="--rewrite-mtp bf16"):
        build(source, tmp_path / "cache", OPTIONS)
    built = build(source, tmp_path / "cache", OPTIONS, rewrites_mtp=True)
    assert built.model_dir.parent == tmp_path / "cache" / "edgellm" / "checkpoints"
    assert calls(tmp_path / "cache")[0][1] == str(built.model_dir)
    assert build(source, tmp_path / "cache", OPTIONS, rewrites_mtp=True).was_cached
    text = describe(built)
    for part in (str(built.bundle.path), "drafts 5", "fp8", "corrected", str(built.model_dir)):
        assert part in text


def test_the_kind_builds_with_the_operators_options_and_refuses_changing_draft_lengths(
    tmp_path: Path, wheel: Path
) -> None:
    checkpoint = open_checkpoint(ck.write_checkpoint(tmp_path / "m", hf_quant=ck.mixed("NVFP4")), read_values=False)
    options = EngineOptions(2, 64, 256, SpeculativeConfig(4), cache_dir=tmp_path / "cache")
    text = build_engine("edgellm", checkpoint, options)
    assert "drafts 4" in text
    assert "rows 2, input 64, capacity 256" in text
    assert "from the cache" in build_engine("edgellm", checkpoint, options)
    assert "drafts 3" in build_engine("edgellm", checkpoint, replace(options, speculative=None))
    for drafting in (SpeculativeConfig(4, adaptive=True), SpeculativeConfig(4, schedule=((1, 2, 3),))):
        with pytest.raises(DemandError, match="draft length is fixed"):
            build_engine("edgellm", checkpoint, replace(options, speculative=drafting))


def test_tree_sizes_reach_the_vendors_builder_and_other_wishes_are_refused(tmp_path: Path, wheel: Path) -> None:
    checkpoint = open_checkpoint(ck.write_checkpoint(tmp_path / "m", hf_quant=ck.mixed("NVFP4")), read_values=False)
    options = EngineOptions(2, 64, 256, SpeculativeConfig(2), cache_dir=tmp_path / "cache")
    build_engine("edgellm", checkpoint, replace(options, max_draft_tree_size=5, max_verify_tree_size=7))
    argv = calls(tmp_path / "cache")[0]
    sizes = [argv[argv.index(flag) + 1] for flag in ("--max-verify-tree-size", "--max-draft-tree-size")]
    assert sizes == ["7", "5"]
    with pytest.raises(CapacityError, match="max-verify-tree-size 2 is below"):
        build_engine("edgellm", checkpoint, replace(options, max_verify_tree_size=2))
    for wish in ({"quantization": frozenset({WeightForm.FP8})}, {"kv_cache_dtype": KvCacheDtype.FP8}):
        with pytest.raises(DemandError, match="follows the checkpoint; leave them out"):
            build_engine("edgellm", checkpoint, replace(options, **wish))


def test_the_correction_keeps_the_model_as_it_was() -> None:
    class Draft:
        def __init__(self) -> None:
            self.norm = lambda hidden: hidden * 10

        def forward(self, *, hidden: int) -> dict[str, int]:
            return {"logits": self.norm(hidden) + 1, "hidden_states": hidden}

    correction = FeedbackCorrection()
    draft = Draft()
    norm = draft.norm
    correction.wrap(Draft)
    assert draft.forward(hidden=70000) == {"logits": 700001, "hidden_states": 700000}
    assert correction.outcome is Feedback.CORRECTED
    assert draft.norm is norm
