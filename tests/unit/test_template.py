"""Chat templates: the same text as transformers writes, and nothing a hostile one can do."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from edgellm_producer.errors import JobRejected
from edgellm_worker.tokenizer.chat_template import ChatTemplate

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "chat_templates.json").read_text())
USER = {"role": "user", "content": "hi"}


def render(source: str, messages: list[dict[str, Any]] | None = None, limit_s: float = 5.0, **kwargs: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}, limit_s=limit_s).render(messages or [USER], None, kwargs)


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: case["template"])
def test_renders_what_transformers_rendered(case: dict[str, Any]) -> None:
    template = ChatTemplate(GOLDEN["templates"][case["template"]], GOLDEN["special_tokens"])
    if "text" in case:
        assert template.render(case["messages"], case["tools"], case["kwargs"]) == case["text"]
    else:
        with pytest.raises(JobRejected) as caught:
            template.render(case["messages"], case["tools"], case["kwargs"])
        assert case["error"] in str(caught.value)


@pytest.mark.oracle
def test_recorded_renderings_are_still_transformers() -> None:
    pytest.importorskip("transformers")
    from tests.golden.make_chat_templates import CASES
    from tests.golden.make_chat_templates import render as theirs

    assert [theirs(*case) for case in CASES] == GOLDEN["cases"]


def test_template_errors_are_the_jobs_rejection_with_the_templates_words() -> None:
    with pytest.raises(JobRejected) as caught:
        render("{{ raise_exception('only user messages, please') }}")
    assert caught.value.code == "template_error"
    assert caught.value.field == "messages"
    assert "only user messages, please" in str(caught.value)


@pytest.mark.parametrize("source", ["{{ nothing.at.all }}", "{{ messages[7].role }}", "{{ 1 / 0 }}", "{{ 'a' + 1 }}"])
def test_whatever_a_template_raises_is_a_rejection(source: str) -> None:
    with pytest.raises(JobRejected, match="chat template failed"):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__.x }}",
        "{{ ''.format.__self__.x }}",
        "{{ '{0.__class__.x}'.format(1) }}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    with pytest.raises(JobRejected, match=r"unsafe|undefined|not callable|no attribute"):
        render(source)


def test_messages_cannot_smuggle_template_code() -> None:
    assert render("{{ messages[0].content }}", [{"role": "user", "content": "{{ 7 * 7 }}"}]) == "{{ 7 * 7 }}"


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{% set _ = f(n - 1) %}{% set _ = f(n - 1) %}{% endif %}{% endmacro %}{{ f(60) }}",
    ],
)
def test_a_template_that_does_not_end_is_interrupted_and_its_thread_is_gone(source: str) -> None:
    with pytest.raises(JobRejected, match="took longer"):
        render(source, limit_s=0.2)
    assert not [t for t in threading.enumerate() if t.name == "chat-template"]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{% for i in range(9999) %}{% for j in range(9999) %}{{ 'x' * 1000 }}{% endfor %}{% endfor %}", "wrote more"),
        ("{{ 'x' * 999999999 }}", "repetition too long"),
        ("{{ 999999999 * [1] }}", "repetition too long"),
        ("{{ 9 ** 9 ** 9 }}", "power too large"),
        ("{% for i in range(99999999) %}{% endfor %}", "too big"),
        ("{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}", "recursion"),
    ],
)
def test_a_template_is_bounded_in_what_it_makes(source: str, words: str) -> None:
    with pytest.raises(JobRejected, match=words):
        render(source)


def test_ordinary_arithmetic_works() -> None:
    assert render("{{ 'ab' * 3 }}{{ 2 ** 10 }}{{ 3 * 1.5 }}{{ [0] * 2 }}") == "ababab10244.5[0, 0]"


def test_kwargs_and_special_tokens_reach_the_template_but_reserved_names_do_not() -> None:
    assert render("{{ bos_token }}{{ mood }}", mood="calm") == "<s>calm"
    assert render("{{ add_generation_prompt }}", add_generation_prompt=False) == "False"
    for name in ("messages", "tools", "tokenize"):
        with pytest.raises(JobRejected) as caught:
            ChatTemplate("", {}).render([USER], None, {name: []})
        assert (caught.value.code, caught.value.field) == ("invalid_field", "chat_template_kwargs")


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "video"])
def test_parts_that_are_not_text_are_rejected(kind: str) -> None:
    content = [{"type": "text", "text": "look"}, {"type": kind, kind: {"url": "x"}}]
    with pytest.raises(JobRejected) as caught:
        render("{{ messages[0].content }}", [{"role": "user", "content": content}])
    assert (caught.value.code, caught.value.field) == ("unsupported_field", "messages")
    assert kind in str(caught.value)


def test_text_parts_are_joined_for_templates_that_take_strings_and_passed_to_those_that_loop() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert render("{{ messages[0]['content'] }}", messages) == "a\nb"
    for loop in ("messages[0].content", "messages[0]['content']"):
        assert render("{% for part in " + loop + " %}[{{ part.text }}]{% endfor %}", messages) == "[a][b]"


def test_arguments_that_came_as_a_json_string_are_objects_for_the_template() -> None:
    call = {"function": {"name": "f", "arguments": '{"x": 1}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert render("{{ messages[0].tool_calls[0].function.arguments | tojson }}", [message]) == '{"x": 1}'
    assert call["function"]["arguments"] == '{"x": 1}'
    call["function"]["arguments"] = "not json"
    assert render("{{ messages[0].tool_calls[0].function.arguments }}", [message]) == "not json"


def test_reasoning_is_found_under_every_name_in_use() -> None:
    for name in ("reasoning_content", "thinking", "reasoning"):
        message = {"role": "assistant", "content": "a", name: "because"}
        assert render("{{ messages[0].reasoning_content }}{{ messages[0].thinking }}", [message]) == "becausebecause"


def test_strftime_now_gives_todays_year() -> None:
    from datetime import UTC, datetime

    assert render("{{ strftime_now('%Y') }}") in {str(datetime.now(UTC).year), str(datetime.now().astimezone().year)}


def test_a_source_that_is_no_template_is_refused_with_its_line() -> None:
    with pytest.raises(ValueError, match="line 2"):
        ChatTemplate("ok\n{% for %}", {})
