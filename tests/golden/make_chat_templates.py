"""Records what transformers' own template renderer writes for the templates and chats below.

Run with an interpreter that has transformers: `python tests/golden/make_chat_templates.py > tests/golden/chat_templates.json`
"""

import json

import transformers
from transformers.utils.chat_template_utils import render_jinja_template

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city <now> & 'here'",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}

TEMPLATES = {
    "chatml": """{% for message in messages %}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{% endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\\n' }}
{% endif %}
""",
    "tools_and_reasoning": """{%- set ns = namespace(last=messages|length - 1) %}
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n' }}{%- endif %}
    {{- '<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' }}{{- tool | tojson }}
    {%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'system' and tools %}{%- continue %}{%- endif %}
    {{- '<|im_start|>' + message.role }}
    {%- if message.reasoning_content is defined and loop.index0 == ns.last - 1 %}
        {{- '\\n<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>' }}
    {%- endif %}
    {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
    {%- for call in message.tool_calls or [] %}
        {%- set call = call.function if call.function else call %}
        {{- '\\n<tool_call>{"name": "' + call.name + '", "arguments": ' }}
        {{- call.arguments if call.arguments is string else call.arguments | tojson }}
        {{- '}</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
""",
    "alternating_with_bos": """{{ bos_token }}{% for message in messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('roles must alternate user/assistant') }}
    {% endif %}
    {% if message['role'] == 'user' %}
{{ '[INST] ' + message['content'] | trim + ' [/INST]' }}
    {%- else %}
{% generation %}{{ ' ' + message['content'] + eos_token }}{% endgeneration %}
    {% endif %}
{% endfor %}""",
    "parts_and_macros": """{% macro text(content) %}
{% if content is string %}{{ content }}{% else %}{% for item in content %}{% if item.type == 'text' %}{{ item.text }}{% endif %}{% endfor %}{% endif %}
{% endmacro %}
{% for message in messages[::-1] | reverse %}
<{{ message.role | upper }}>{{ text(message.content) }}{{ '' if loop.last else '\\n' }}
{% if loop.index > 2 %}{% break %}{% endif %}
{% endfor %}
{% for key, value in extra | dictsort %}{{ key }}={{ value | tojson(indent=1) }};{% endfor %}
""",
}

USER = {"role": "user", "content": "Hi <there> & you"}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Zürich"}}}
    ],
}
CASES = [
    ("chatml", [USER], None, {}),
    (
        "chatml",
        [{"role": "system", "content": "Be brief."}, USER, {"role": "assistant", "content": "Yes?"}, USER],
        None,
        {},
    ),
    ("tools_and_reasoning", [USER], [TOOL], {}),
    ("tools_and_reasoning", [{"role": "system", "content": "S"}, USER], [TOOL], {"enable_thinking": False}),
    ("tools_and_reasoning", [USER, CALL, {"role": "tool", "content": '{"t": 3}'}], [TOOL], {}),
    (
        "tools_and_reasoning",
        [USER, {"role": "assistant", "reasoning_content": "\\nhm\\n", "content": "A"}, USER],
        None,
        {},
    ),
    ("tools_and_reasoning", [USER, {"role": "assistant", "reasoning": "older name", "content": "A"}, USER], None, {}),
    ("alternating_with_bos", [USER, {"role": "assistant", "content": "Yes"}, USER], None, {}),
    ("alternating_with_bos", [USER, USER], None, {}),
    (
        "parts_and_macros",
        [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
        None,
        {"extra": {"z": [1, "é"], "a": None}},
    ),
    ("parts_and_macros", [USER, USER, USER, USER], None, {"extra": {}}),
]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def render(name: str, messages: list, tools: list | None, kwargs: dict) -> dict:
    case = {"template": name, "messages": messages, "tools": tools, "kwargs": kwargs}
    given = [{k: v for k, v in m.items() if v is not None} for m in messages]  # apply_chat_template drops empty fields
    try:
        texts, _ = render_jinja_template(
            [given], tools=tools, chat_template=TEMPLATES[name], add_generation_prompt=True, **SPECIAL, **kwargs
        )
    except Exception as error:  # noqa: BLE001 - what it raises is what is recorded
        return case | {"error": str(error)}
    return case | {"text": texts[0]}


if __name__ == "__main__":
    made_with = f"transformers {transformers.__version__}"
    cases = [render(*case) for case in CASES]
    print(
        json.dumps(
            {"made_with": made_with, "special_tokens": SPECIAL, "templates": TEMPLATES, "cases": cases}, indent=1
        )
    )
