"""Structured output: every text is of its schema or expression, at any draft length, and is a draw from the model's
distribution within it.
"""

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from edgellm_producer.errors import JobRejected
from edgellm_producer.wire import Job, job_from
from edgellm_worker.engine.api import FinishReason, GenerationRequest, SamplingParams
from edgellm_worker.engine.errors import CheckpointError, RequestError, RowError
from edgellm_worker.engine.load import EngineOptions
from edgellm_worker.engine.runtime.acceptance import accept
from edgellm_worker.engine.runtime.grammar import GrammarCompiler, check_grammar
from edgellm_worker.engine.runtime.reference import reference_engine
from edgellm_worker.engine.runtime.sampling import RowSampler
from edgellm_worker.engine.runtime.scores import DenseScores
from edgellm_worker.engine.runtime.speculative import SpeculativeEngine
from edgellm_worker.engine.runtime.speculative_config import SpeculativeConfig
from edgellm_worker.jobs import grammar_of
from edgellm_worker.tokenizer import Tokenizer
from tests.support.distribution import chi_square
from tests.support.tiny_engine import CHECKPOINT, generate, tiny_engine, tiny_model

EOS = frozenset({8189, 8191})
VOCABULARY = 8192
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["a", "bc"]},
    },
    "required": ["name", "count", "kind"],
    "additionalProperties": False,
}
tokenizer = Tokenizer(CHECKPOINT)
compiler = GrammarCompiler(CHECKPOINT / "tokenizer.json", VOCABULARY)


def request(grammar: dict, *, max_new_tokens: int = 60, **params: float) -> GenerationRequest:
    prompt = tokenizer.encode("def get_settings():\n    return ")
    return GenerationRequest(prompt, max_new_tokens, SamplingParams(**params), EOS, json.dumps(grammar))


def engine(num_drafts: int, max_batch_size: int = 4) -> SpeculativeEngine:
    options = EngineOptions(max_batch_size, 512, 512, SpeculativeConfig(num_drafts))
    return reference_engine(tiny_model(), options, grammars=compiler)


JSON_REQUESTS = [
    request({"json_schema": SCHEMA}),
    request({"json_schema": SCHEMA}, temperature=1.0, seed=1),
    request({"json_schema": SCHEMA}, temperature=1.3, top_k=20, top_p=0.9, seed=2),
]
REGEX_REQUEST = request({"regex": "[a-f]{2,4}(-[0-9]{2}){1,3}"}, temperature=1.0, seed=3)


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_texts_are_of_their_schema_beside_rows_without_one(num_drafts: int) -> None:
    free = replace(JSON_REQUESTS[1], grammar=None, max_new_tokens=10)
    texts = generate(engine(num_drafts), [*JSON_REQUESTS, REGEX_REQUEST, free])
    for ids in texts[:3]:
        value = json.loads(tokenizer.decode(ids))
        assert set(value) == {"name", "count", "kind"}
        assert isinstance(value["count"], int)
        assert 0 <= value["count"] <= 99
        assert len(value["name"]) <= 8
        assert value["kind"] in {"a", "bc"}
        assert ids[-1] in EOS
    assert re.fullmatch("[a-f]{2,4}(-[0-9]{2}){1,3}", tokenizer.decode(texts[3]))
    assert texts[4] == generate(tiny_engine(4, 0), [free])[0]


def test_text_is_the_same_with_any_number_of_drafts_and_drafts_are_accepted() -> None:
    plain = generate(engine(0), [*JSON_REQUESTS, REGEX_REQUEST])
    for num_drafts in (1, 5):
        assert generate(engine(num_drafts), [*JSON_REQUESTS, REGEX_REQUEST]) == plain
    drafting, accepted = engine(3), 0
    drafting.add(0, JSON_REQUESTS[0])
    while drafting.num_rows:
        accepted += sum(update.num_accepted for update in drafting.step().updates)
    assert accepted > 3


def test_a_text_cut_by_its_length_is_a_beginning() -> None:
    updates = []
    cut = engine(3)
    cut.add(0, replace(JSON_REQUESTS[0], max_new_tokens=4))
    while cut.num_rows:
        updates += cut.step().updates
    assert updates[-1].finish_reason is FinishReason.LENGTH
    text = tokenizer.decode([i for update in updates for i in update.token_ids])
    assert text.startswith("{")


def test_sampling_within_the_grammar_is_lossless() -> None:
    """Digits only: the drawn digits follow the model's probabilities renormalised over what is allowed, 0 and 3 drafts."""
    rng = np.random.default_rng(5)
    logits = rng.normal(0, 2, VOCABULARY).astype(np.float32)
    head = logits + rng.normal(0, 1, VOCABULARY).astype(np.float32)
    digits = [tokenizer.encode(d)[0] for d in "0123456789"]
    one = request({"regex": "[0-9]"})
    assert np.flatnonzero(compiler.grammar(one).allowed()).tolist() == sorted(digits)
    weights = np.exp(logits[digits].astype(np.float64))
    for num_drafts in (0, 1):
        counts = np.zeros(10)
        for seed in range(1500):
            sampler = RowSampler(SamplingParams(temperature=1.0, seed=seed), (), compiler.grammar(one))
            drafts = [sampler.draft(DenseScores(head), 7) for _ in range(num_drafts)]
            scores = [DenseScores(logits)] * (num_drafts + 1)
            first = accept(sampler, scores, drafts, 7, stop_ids=EOS, max_tokens=9).token_ids[0]
            counts[digits.index(first)] += 1
        assert chi_square(counts, weights / weights.sum() * 1500).passes


def test_drafts_follow_the_grammar_and_a_rejected_one_leaves_no_trace() -> None:
    a, b = tokenizer.encode("a")[0], tokenizer.encode("b")[0]
    sampler = RowSampler(SamplingParams(), (), compiler.grammar(request({"regex": "ab|ba"})))
    likes_a = np.zeros(VOCABULARY, np.float32)
    likes_a[[a, b]] = [2.0, 1.0]
    assert sampler.draft(DenseScores(likes_a), 0) == a
    assert sampler.draft(DenseScores(likes_a), 1) == b  # after an a
    likes_b = np.zeros(VOCABULARY, np.float32)
    likes_b[[a, b]] = [1.0, 2.0]
    accepted = accept(sampler, [DenseScores(likes_b)] * 2, [a], 0, stop_ids=EOS, max_tokens=9)
    assert accepted.token_ids == (b,)
    assert sampler.draft(DenseScores(likes_b), 1) == a  # after the committed b, not after the drafted a


def test_eos_is_allowed_only_when_the_text_is_complete() -> None:
    grammar = compiler.grammar(request({"regex": "ab?"}))
    assert not grammar.allowed()[8191]
    grammar.take(tokenizer.encode("a")[0])
    assert grammar.allowed()[8191]
    grammar.take(tokenizer.encode("b")[0])
    assert np.flatnonzero(grammar.allowed()).tolist() == sorted(EOS)
    with pytest.raises(RowError, match="structured output"):
        grammar.take(tokenizer.encode("b")[0])


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ({"regex": "(["}, "regex parse error"),
        ({"json_schema": {"type": "objectx"}}, "objectx"),
        ({"lark": "start: x"}, "neither a json_schema nor a regex"),
        ({"json_schema": {"type": "object", "if": {"required": ["a"]}}}, "Unimplemented keys"),
    ],
)
def test_constraints_that_cannot_be_met_are_refused_by_name(grammar: dict, words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        check_grammar(request(grammar))
    assert caught.value.field == "response_format"


@pytest.mark.parametrize(
    "grammar",
    [{"json_schema": {"$ref": "#"}}, {"json_schema": {"allOf": [{"$ref": "#"}]}}, {"regex": r"[^\s\S]"}],
)
def test_a_constraint_that_no_text_meets_is_refused_before_its_row_runs(grammar: dict) -> None:
    """It takes a vocabulary to see it."""
    check_grammar(request(grammar))
    running = engine(0)
    with pytest.raises(
        RequestError, match=r"no text meets it: an expression without a match, or a \$ref that leads back"
    ):
        running.add(0, request(grammar))
    assert running.num_rows == 0


@pytest.mark.parametrize(
    "grammar",
    [
        {"json_schema": {"type": "array", "items": {"$ref": "#"}}},
        {"json_schema": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
        {"regex": ""},
        {"regex": "\u00e9"},
    ],
)
def test_a_schema_may_contain_itself_and_a_text_may_be_empty(grammar: dict) -> None:
    check_grammar(request(grammar))
    assert compiler.grammar(request(grammar)).allowed().any()


def test_a_constraint_needs_an_eos_and_an_engine_that_has_grammars() -> None:
    with pytest.raises(RequestError, match="ignore_eos"):
        check_grammar(replace(REGEX_REQUEST, eos_token_ids=frozenset()))
    with pytest.raises(RequestError, match="no structured output") as caught:
        tiny_engine(1, 0).add(0, REGEX_REQUEST)
    assert caught.value.code == "unsupported_field"


def test_a_constraint_that_grows_too_complex_fails_its_row_in_one_line() -> None:
    grammar = compiler.grammar(request({"regex": "(a?){500}a{500}"}))

    def go_on() -> None:
        for _ in range(50):
            grammar.take(int(np.flatnonzero(grammar.allowed())[0]))

    with pytest.raises(RowError, match=r"structured output: lexer error: too many expressions") as caught:
        go_on()
    assert "\n" not in str(caught.value)


def test_a_missing_tokenizer_is_the_checkpoints_fault() -> None:
    with pytest.raises(CheckpointError, match="nowhere"):
        GrammarCompiler(CHECKPOINT / "nowhere", VOCABULARY).grammar(REGEX_REQUEST)


# The wire's side


def test_response_formats_become_constraints() -> None:
    def grammar(**response_format: object) -> object:
        text = grammar_of(Job(id="a", prompt="x", response_format=response_format))
        return None if text is None else json.loads(text)

    assert grammar(type="text") is None
    assert grammar(type="json_object") == {"json_schema": {"type": "object"}}
    assert grammar(type="regex", regex="a+") == {"regex": "a+"}
    schema = {"name": "n", "strict": True, "schema": {"type": "integer"}}
    assert grammar(type="json_schema", json_schema=schema) == {"json_schema": {"type": "integer"}}


@pytest.mark.parametrize(
    "response_format",
    [
        {},
        {"type": "xml"},
        {"type": ["regex"]},
        {"type": "regex"},
        {"type": "regex", "regex": ""},
        {"type": "regex", "regex": "a" * 5000},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"name": "n"}},
        {"type": "json_schema", "json_schema": {"schema": {}, "depth": 3}},
        {"type": "json_schema", "json_schema": {"schema": {}}, "regex": "a"},
        {"type": "text", "regex": "a"},
    ],
)
def test_contradictory_and_malformed_formats_are_rejected_by_field(response_format: dict) -> None:
    with pytest.raises(JobRejected) as caught:
        job_from({"id": "a", "prompt": "x", "response_format": response_format})
    assert (caught.value.code, caught.value.field) == ("invalid_field", "response_format")
