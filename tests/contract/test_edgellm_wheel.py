"""The adapter against the vendor's real wheel: its Python layers and value classes are real, its runtime is the fake.

Run with `make vendor` (tests/support/edgellm_vendor.py says where the wheel comes from).
"""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path
from typing import Any

import pytest

from edgellm_worker.engine.api import FinishReason, SamplingParams
from edgellm_worker.engine.edgellm.builder import builder_argv
from edgellm_worker.engine.edgellm.cache import BuildOptions
from edgellm_worker.engine.edgellm.call import native_request
from edgellm_worker.engine.edgellm.feedback import Feedback, FeedbackCorrection
from edgellm_worker.engine.edgellm.fields import batch_fields
from edgellm_worker.engine.edgellm.native import Capabilities, accepted_parameters, detect, load_native
from edgellm_worker.engine.edgellm.open import EdgeLlmOptions, open_bundle
from edgellm_worker.engine.edgellm.rows import Row
from edgellm_worker.engine.errors import BuildError
from tests.support import fake_edgellm as fake
from tests.support.edgellm_dump import load_dump, parameters_of
from tests.support.edgellm_fake_wheel import BUILDER_FLAGS
from tests.support.edgellm_setup import EOS, MODEL_DIR, count_tokens, job, open_fake, run_all, write_bundle
from tests.support.edgellm_vendor import import_draft_module, load_real_module, wheel_folder
from tests.support.fake_edgellm import Behaviour, Script

pytestmark = pytest.mark.vendor


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_real_module(tmp_path_factory.mktemp("stubs"))


@pytest.fixture
def wheel(monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = wheel_folder()
    monkeypatch.syspath_prepend(folder)
    return folder


def test_the_recorded_signatures_are_the_modules(real: Any) -> None:
    for name, dumped in load_dump().classes.items():
        cls = getattr(real, name)
        properties = {n: p for n, p in vars(cls).items() if isinstance(p, property) and n != "__doc__"}
        assert {n: p.fset is not None for n, p in properties.items()} == dumped.properties, name
        for member, value in dumped.members.items():
            assert int(getattr(cls, member)) == value
        for method, parameters in dumped.methods.items():
            if method != "create" and parameters:
                assert parameters_of(getattr(cls, method).__doc__) == parameters, (name, method)


def test_capabilities_of_the_real_module(real: Any) -> None:
    assert detect(real) == Capabilities(
        batched_drafting=True, in_flight=True, in_flight_drafting=False, drafting_counters=True
    )
    assert "max_batch_size" in accepted_parameters(real.RequestEngine.__init__)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(),
        SamplingParams(top_logprobs=0),
        SamplingParams(top_logprobs=5),
        SamplingParams(logit_bias={3: -100.0}),
        SamplingParams(temperature=1.0, seed=(1 << 63) - 1),
        SamplingParams(temperature=0.3, top_k=40, top_p=0.9, seed=0),
    ],
)
def test_every_kind_of_request_passes_the_real_value_classes(real: Any, sampling: SamplingParams) -> None:
    rows = [Row(i, job("text", 5), 3, None) for i in range(3)]
    for row in rows:
        row.request = type(row.request)(row.request.prompt_token_ids, 5, sampling, frozenset({EOS}))
    fields = batch_fields(sampling)
    request = native_request(real, fields, rows, ["a", "b", "c"], 5)
    assert [row.messages[0].contents[0].content for row in request.requests] == ["a", "b", "c"]
    assert len(request.stream_channels) == 3
    assert (request.top_k, request.num_logprobs) == (fields.top_k, fields.num_logprobs)
    assert request.temperature == pytest.approx(fields.temperature)
    assert request.top_p < 1 - 1e-6 or sampling.temperature == 0  # as a float of 32 bits, too
    assert request.requests[0].sampling_seed == (sampling.seed if sampling.temperature else None)
    assert dict(request.requests[0].logit_bias) == pytest.approx(dict(sampling.logit_bias))
    assert request.tool_choice.mode == real.ToolChoiceMode.NONE
    assert request.context_cache_lookup_policy == real.ContextCacheLookupPolicy.BYPASS


def test_eight_mixed_jobs_through_real_value_classes(real: Any, tmp_path: Path) -> None:
    scripts = {"stop": Script([[10], [11, 12], [EOS]]), "long": Script([[10], [11, 12, 13]])}
    behaviour = Behaviour(lambda text: scripts[text.split()[0]], count_tokens)
    engine = open_fake(write_bundle(tmp_path), behaviour, values=real)
    jobs = [job(f"{kind} {n}", 6 + n, temperature=t, seed=n) for n in range(2) for kind in scripts for t in (0.0, 0.8)]
    groups: dict[Any, dict[int, Any]] = {}
    for row_id, request in enumerate(jobs):
        groups.setdefault(engine.compat_key(request), {})[row_id] = request
    for members in groups.values():
        got = run_all(engine, members)
        for row_id in members:
            is_long = row_id % 4 >= 2
            assert got.finish(row_id) is (FinishReason.LENGTH if is_long else FinishReason.STOP)
            assert len(got.tokens(row_id)) == (jobs[row_id].max_new_tokens if is_long else 4)
    assert len(behaviour.calls) == 2
    greedy, sampled = sorted(behaviour.calls, key=lambda call: call["disable_spec_decode"])
    assert (len(greedy["texts"]), greedy["seeds"], greedy["temperature"]) == (4, [None] * 4, 0.0)
    assert (len(sampled["texts"]), sampled["seeds"]) == (4, [0, 0, 1, 1])
    assert sampled["spec_proposal_sampling"] == real.SpecProposalSampling.GREEDY


def test_fake_value_classes_default_as_the_real_ones(real: Any) -> None:
    for name, cls in fake.VALUE_CLASSES.items():
        if not hasattr(cls, "FIELDS"):
            continue
        ours, theirs = cls(), getattr(real, name)()
        for field in cls.FIELDS:
            expected = getattr(theirs, field)
            if isinstance(expected, (str, int, float, bool, list, dict, type(None))):
                assert getattr(ours, field) == expected, (name, field)


def test_the_builders_real_parser_takes_our_arguments(wheel: Path) -> None:
    cli = importlib.import_module("experimental.builder.cli")
    options = BuildOptions(num_speculative_tokens=5, max_batch_size=2, max_input_len=128, max_kv_cache_capacity=256)
    args = cli._parser().parse_args(builder_argv(Path("/m"), Path("/out"), options))
    assert (args.max_verify_tree_size, args.max_draft_tree_size, args.spec_type) == (6, 5, "mtp")
    assert (args.max_input_len, args.max_kv_cache_capacity, args.max_batch_size) == (128, 256, 2)
    known = {option for action in cli._parser()._actions for option in action.option_strings}
    assert set(BUILDER_FLAGS) <= known


class Traced:
    """A tensor that is the text of its own computation."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __add__(self, other: Traced) -> Traced:
        return Traced(f"({self.text} + {other.text})")

    def cast(self, _dtype: object) -> Traced:
        return self

    def log_softmax(self, _axis: int) -> Traced:
        return self


def op(name: str) -> Any:
    return lambda *inputs: Traced(f"{name}({', '.join(i.text for i in inputs if isinstance(i, Traced))})")


def test_the_correction_mends_the_real_draft(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The vendor's own forward pass, traced: the hidden state that it hands on, before and after."""
    module = import_draft_module(monkeypatch)
    draft_class = module.Qwen35MtpDraftModel
    monkeypatch.setattr(draft_class, "forward", draft_class.forward)  # restored at the end
    monkeypatch.setattr(module.F, "concatenate", lambda parts, axis: op("concat")(*parts))
    monkeypatch.setattr(module.F, "gather_token_rows", lambda hidden, rows: op("rows")(hidden))
    model = draft_class.__new__(draft_class)
    for name in ("pre_embed_norm", "pre_hidden_norm", "fc", "norm", "lm_head"):
        setattr(model, name, op(name))
    model.layers = [lambda hidden, *rest: (op("layer")(hidden), Traced("cache"))]
    names = [*module.RaggedDecoderInputs.__dataclass_fields__, "inputs_embeds", "rope", "base_hidden", "draft_hidden"]
    inputs = {name: Traced(name) for name in [*names, "attention_mask", "attention_pos_id"]}
    inputs["past_key_values"] = [Traced("kv")]
    rows = "rows(layer(fc(concat(pre_embed_norm(inputs_embeds), pre_hidden_norm((base_hidden + draft_hidden))))))"

    shipped = draft_class.forward(model, **inputs)
    assert shipped["hidden_states"].text == rows
    correction = FeedbackCorrection()
    correction.install()
    corrected = draft_class.forward(model, **inputs)
    assert correction.outcome is Feedback.CORRECTED
    assert corrected["hidden_states"].text == f"norm({rows})"
    assert corrected["logits"].text == shipped["logits"].text == f"lm_head(norm({rows}))"


def test_the_vendors_loader_gives_the_module_that_the_engine_runs_on(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its Python layers are real: they hand out the module that was loaded before, here the fake."""
    behaviour = Behaviour(lambda text: Script([[10], [EOS]]), count_tokens)
    module = fake.make_module(behaviour)
    monkeypatch.setattr(importlib.import_module("tensorrt_edgellm._native.load"), "_MODULE", module)
    assert load_native() is module
    engine = open_bundle(EdgeLlmOptions(write_bundle(tmp_path), MODEL_DIR))
    assert run_all(engine, {1: job("text")}).tokens(1) == [10, EOS]


def test_a_machine_without_a_payload_is_told_the_vendors_reason(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "tensorrt_edgellm"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(BuildError, match="has no native runtime for this machine"):
        load_native()


def test_the_vendors_own_server_calls_the_runtime_as_we_do(wheel: Path) -> None:
    """Positional arguments of both constructors, from its source."""
    source = inspect.getsource(importlib.import_module("experimental.server.runtime.engine"))
    body = source[source.index("self._runtime = self._rt.LLMRuntime(") :]
    names = [line.strip().rstrip(",") for line in body.split("(", 1)[1].split(")")[0].splitlines() if line.strip()]
    assert names == [
        "self._bundle_dir",
        "self._media_dir",
        "{}",
        "self._draft_top_k",
        "self._draft_step",
        "self._verify_tree_size",
        "self._model_dir",
        "self._draft_model_dir",
        "context_cache_config",
        "self._dflash_block_size",
    ]
