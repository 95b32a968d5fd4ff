"""The stand-in for the vendor's module has the recorded signatures, neither more nor less where it matters."""

from __future__ import annotations

import dataclasses
import enum
import inspect

import pytest

from edgellm_worker.engine.edgellm.native import accepted_parameters
from tests.support import fake_edgellm as fake
from tests.support.edgellm_dump import load_dump

DUMP = load_dump()
MODULE = fake.make_module(fake.Behaviour(lambda text: fake.Script([[1]])))

ENUMS = [cls for cls in fake.VALUE_CLASSES.values() if issubclass(cls, enum.Enum)]
VALUES = [cls for cls in fake.VALUE_CLASSES.values() if not issubclass(cls, enum.Enum)]
RECORDS = [fake.StreamChunk, fake.LogprobEntry, fake.LLMGenerationResponse, fake.SpecDecodeGenerationMetrics]
DRIVEN = [fake.LLMRuntime, fake.RequestEngine, fake.RequestHandle, fake.StreamChannel]
RUNTIME_SIDE = {"push", "finish"}  # of a channel: what the binding hides


def same_default(recorded: str, value: object) -> bool:
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}: {int(value)}" in recorded
    return recorded.startswith("<") or recorded == repr(value)


def test_the_dump_is_read() -> None:
    assert len(DUMP.classes) > 30
    assert DUMP.classes["FinishReason"].members["STOP_WORDS"] == 5
    assert DUMP.classes["LLMGenerationRequest"].properties["requests"]
    assert not DUMP.classes["LLMGenerationResponse"].properties["finish_reasons"]
    assert {"draft_step", "verify_tree_size"} <= DUMP.classes["LLMRuntime"].methods["__init__"]


@pytest.mark.parametrize("cls", ENUMS, ids=lambda c: c.__name__)
def test_enums_have_the_recorded_members(cls: type[enum.IntEnum]) -> None:
    assert {member.name: member.value for member in cls} == DUMP.classes[cls.__name__].members


@pytest.mark.parametrize("cls", VALUES, ids=lambda c: c.__name__)
def test_value_classes_have_the_recorded_fields_and_defaults(cls: type) -> None:
    dumped = DUMP.classes[cls.__name__]
    assert set(cls.FIELDS) == set(dumped.properties)
    value = cls()
    for name, recorded in dumped.defaults.items():
        assert same_default(recorded, getattr(value, name)), name


@pytest.mark.parametrize("cls", RECORDS, ids=lambda c: c.__name__)
def test_records_have_the_recorded_fields(cls: type) -> None:
    assert {f.name for f in dataclasses.fields(cls)} == set(DUMP.classes[cls.__name__].properties)


@pytest.mark.parametrize("cls", DRIVEN, ids=lambda c: c.__name__)
def test_driven_classes_have_only_recorded_methods_with_the_recorded_parameters(cls: type) -> None:
    dumped = DUMP.classes[cls.__name__]
    for name, function in inspect.getmembers(cls, callable):
        if name.startswith("_") or name in RUNTIME_SIDE:
            continue
        assert name in dumped.methods, name
        parameters = set(inspect.signature(function).parameters) - {"self"}
        if name != "create":  # recorded as a static method, without its signature
            assert parameters == dumped.methods[name], name


def test_the_request_engine_is_constructed_with_the_recorded_parameters() -> None:
    parameters = set(inspect.signature(MODULE.RequestEngine.__init__).parameters) - {"self"}
    assert parameters == DUMP.classes["RequestEngine"].methods["__init__"]


def test_the_runtime_is_constructed_with_the_recorded_parameters() -> None:
    parameters = accepted_parameters(MODULE.LLMRuntime.__init__) - {"self", "args"}
    assert parameters == DUMP.classes["LLMRuntime"].methods["__init__"]


def test_functions_are_recorded() -> None:
    assert {"set_profiling_enabled", "get_profiling_enabled"} <= set(DUMP.functions)


def test_unknown_attributes_are_refused_and_lists_are_copies() -> None:
    request = MODULE.LLMGenerationRequest()
    with pytest.raises(AttributeError):
        request.max_tokens = 5
    request.requests.append(MODULE.Request())
    assert request.requests == []
