"""Chat templates: equal to transformers' rendering, in a sandbox, and an error instead of silent raw text."""

import datetime

import pytest

from splitserve.errors import RequestError, WeightsError
from splitserve.text.chat import ChatTemplate
from splitserve.text.tokenizer import Templates

TALK = [
    {"role": "system", "content": "Be <brief> & é."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": "Bye"},
]

TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "description": "<d> é", "parameters": {"b": 1, "a": [1, 2]}},
    }
]

TEMPLATES = {
    "chatml": """{% for message in messages %}
    {% if loop.first and message['role'] != 'system' %}{{ 'default' }}{% endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + eos_token }}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}""",
    "tools": """{{ bos_token }}{% if tools %}
{% for t in tools %}{{ t | tojson }}|{{ t.function.parameters | tojson(indent=2) }}{% endfor %}
{% endif %}
{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}[{{ m.content | trim }}]{% endgeneration %}
{% continue %}{% endif %}{{ m.content }};
{% endfor %}""",
    "control": """{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}
{% if ns.n > 2 %}{% break %}{% endif %}{{ m.content.split(' ') | length }}{{ ns.n }}{% endfor %}
{{ kind | default('x') }}""",
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("generate", [True, False])
def test_renders_as_transformers(name, tools, generate):
    from transformers.utils.chat_template_utils import render_jinja_template

    ours = ChatTemplate(
        Templates(default=TEMPLATES[name], variables={"bos_token": "<s>", "eos_token": "</s>"})
    )
    got = ours.render(TALK, tools=tools, add_generation_prompt=generate, variables={"kind": "k"})
    (want,), _ = render_jinja_template(
        conversations=[TALK],
        tools=tools,
        chat_template=TEMPLATES[name],
        add_generation_prompt=generate,
        bos_token="<s>",
        eos_token="</s>",
        kind="k",
    )
    assert got == want


def test_no_template_is_an_error_that_says_so():
    with pytest.raises(RequestError, match="no chat template") as caught:
        ChatTemplate(Templates()).render(TALK)
    assert caught.value.field == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[9].content }}",
        "{{ messages[0].content + 1 }}",
        "{{ 1 / 0 }}",
        "{{ ''.__class__.__mro__[1].__subclasses__()[0] }}",
        "{% set x = messages.append(1) %}",
    ],
)
def test_what_a_template_trips_over_is_the_request(source):
    with pytest.raises(RequestError, match="the chat template refuses") as caught:
        ChatTemplate(Templates(default=source)).render(TALK)
    assert caught.value.field == "messages"


def test_a_client_can_not_bring_its_own_names():
    with pytest.raises(RequestError, match="may not set 'messages'"):
        ChatTemplate(Templates(default="x")).render(TALK, variables={"messages": []})


def test_malformed_template_fails_when_the_model_is_loaded():
    with pytest.raises(WeightsError, match="malformed at line 2"):
        ChatTemplate(Templates(default="ok\n{% if %}"))


def test_strftime_now_and_tool_template():
    made = ChatTemplate(Templates(default="{{ strftime_now('%Y') }}", tool_use="T"))
    assert made.render(TALK) == str(datetime.datetime.now().year)
    assert made.render(TALK, tools=TOOLS) == "T"


def test_continue_final_message_leaves_it_open():
    made = ChatTemplate(Templates(default=TEMPLATES["chatml"], variables={"eos_token": "</s>"}))
    text = made.render([*TALK, {"role": "assistant", "content": "The answer is "}], continue_final=True)
    assert text.endswith("<|im_start|>assistant\nThe answer is ")
    trims = ChatTemplate(Templates(default="{% for m in messages %}<{{ m.content | trim }}>{% endfor %}"))
    assert trims.render([{"role": "assistant", "content": " so "}], continue_final=True) == "<so"
    with pytest.raises(RequestError, match="needs a last message"):
        made.render([{"role": "assistant", "content": ""}], continue_final=True)
