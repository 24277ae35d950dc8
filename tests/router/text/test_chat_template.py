"""Chat templates, rendered as transformers renders them."""

import datetime

import pytest
from support.engines.small_tokenizers import byte_level, byte_level_rust
from transformers.utils.chat_template_utils import render_jinja_template

from baton.errors import InvalidRequest
from router.text.chat_template import LOOP_SECONDS, ChatTemplate, ImagePart, SlowTemplate, Turn
from router.text.tokenizer import Tokenizer

TURNS = [
    Turn("system", "Be <b>brief</b> & kind."),
    Turn("user", 'Say "hé" 你'),
    Turn("assistant", "hé"),
    Turn("user", "?"),
]

CHATML = """{% for message in messages %}
    {%- if loop.first and message['role'] != 'system' %}
        {{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""

LLAMA = """{{ bos_token }}{% for message in messages %}
{% if message['role'] == 'user' %}
[INST] {{ message['content'] | trim }} [/INST]
{% elif message['role'] == 'assistant' %}
{% generation %}
{{ message['content'] }}{{ eos_token }}
{% endgeneration %}
{% endif %}
{% endfor %}"""

FEATURES = """{% set ns = namespace(count=0) %}
{% for message in messages %}
  {% if message.role == 'system' %}{% continue %}{% endif %}
  {% set ns.count = ns.count + 1 %}
  {{ ns.count }} {{ message | tojson }} {{ message.content | length }}
{% endfor %}
{{ {'b': 1, 'a': '<é>'} | tojson(indent=2) }}
{% if tools %}tools{% endif %}{{ strftime_now('%Y') }}"""


@pytest.mark.parametrize("template", [CHATML, LLAMA, FEATURES], ids=["chatml", "llama", "features"])
@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False}], ids=["plain", "variables"])
def test_the_text_equals_that_of_transformers(template: str, variables: dict[str, object]) -> None:
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    messages = [{"role": turn.role, "content": turn.content} for turn in TURNS]
    expected, _ = render_jinja_template(
        conversations=[messages], chat_template=template, add_generation_prompt=True, **special, **variables
    )
    assert ChatTemplate(template, special).render(TURNS, variables) == expected[0]


# As LLaVA 1.5's: nothing but lists, and all images before all text.
LISTS_ONLY = """{% for message in messages %}{{ message['role'].upper() + ': ' }}
{%- for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}
{%- for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ content['text'] + ' ' }}{% endfor %}
{%- endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"""

# As Qwen2-VL's: a text or a list, in its own order.
EITHER = """{% for message in messages %}<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for content in message['content'] %}
{%- if content.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ content['text'] }}{% endif %}
{%- endfor %}{% endif %}<|im_end|>
{% endfor %}"""

ABOUT_IMAGES = [Turn("system", "Be brief."), Turn("user", ["first ", ImagePart(), " then ", ImagePart(), "?"])]
AS_LISTS = [
    {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "first "},
            {"type": "image"},
            {"type": "text", "text": " then "},
            {"type": "image"},
            {"type": "text", "text": "?"},
        ],
    },
]


@pytest.mark.parametrize("template", [LISTS_ONLY, EITHER], ids=["lists only", "either"])
def test_messages_with_images_are_rendered_as_by_transformers(template: str) -> None:
    expected, _ = render_jinja_template(conversations=[AS_LISTS], chat_template=template, add_generation_prompt=True)
    assert ChatTemplate(template, {}, "unused").render(ABOUT_IMAGES, {}) == expected[0]


def test_a_template_that_takes_lists_only_gets_texts_as_lists() -> None:
    assert ChatTemplate(LISTS_ONLY, {}).render([Turn("user", "hello")], {}) == "USER: hello ASSISTANT:"


def test_for_a_template_that_takes_texts_only_an_image_is_its_placeholder() -> None:
    text = ChatTemplate(CHATML, {}, "<image>").render([Turn("user", [ImagePart(), "what?"])], {})
    assert "<|im_start|>user\n<image>\nwhat?<|im_end|>" in text


def test_a_template_that_refuses_a_conversation_is_the_requests_fault() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(InvalidRequest, match="roles must alternate") as caught:
        template.render(TURNS, {})
    assert caught.value.violations[0].field == "chat.messages"


def test_a_template_cannot_reach_into_the_process() -> None:
    template = ChatTemplate("{{ messages.__class__.__mro__[1].__subclasses__() }}", {})
    with pytest.raises(InvalidRequest, match="unsafe"):
        template.render(TURNS, {})


def test_the_current_date_is_available() -> None:
    assert ChatTemplate("{{ strftime_now('%Y') }}", {}).render([], {}) == str(datetime.datetime.now().year)


def test_a_rendered_conversation_gets_no_special_tokens_a_prompt_does() -> None:
    from tokenizers.processors import TemplateProcessing

    rust = byte_level_rust()
    rust.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = Tokenizer(rust.to_str().encode(), "{}", "x")
    assert tokenizer.encode("fox") == [0, *tokenizer.encode_chat("fox")]


def test_the_template_inside_the_configuration_is_used_where_there_is_no_other() -> None:
    named = '[{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes {{ bos_token }}"}]'
    config = f'{{"bos_token": {{"content": "<s>"}}, "chat_template": {named}}}'
    assert byte_level(config).render([], {}) == "yes <s>"
    assert byte_level(config, template="card").render([], {}) == "card"


def test_saved_truncation_does_not_cut_prompts() -> None:
    rust = byte_level_rust()
    rust.enable_truncation(4)
    assert len(Tokenizer(rust.to_str().encode(), "{}", "").encode("x" * 50)) > 4


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{{ loop.length }}{% endfor %}{% endfor %}",
        "{{ 'a' * 99999999999 }}",
        "{{ 99999999999 * [1] }}",
        "{{ 9 ** 9 ** 9 }}",
        "{% macro f(n) %}{% if n > 0 %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
        "{% set n = namespace(x='ab') %}{% for i in range(50) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "{% set x = 'ab' %}" + "{% set x = x + x %}" * 50,
        "{% set x = 'ab' %}" + "{% set x %}{{ x }}{{ x }}{% endset %}" * 50,
        "{% macro f(x) %}{{ f(x + x) }}{% endmacro %}{{ f('ab') }}",
    ],
)
def test_a_template_that_would_not_end_soon_refuses_the_conversation(template: str) -> None:
    with pytest.raises(InvalidRequest, match="chat template"):
        ChatTemplate(template, {}).render(TURNS, {})


def test_a_template_is_interrupted_after_the_time_that_it_is_given() -> None:
    template = ChatTemplate("{% for a in range(n) %}{% for b in range(n) %}{% endfor %}{% endfor %}", {})
    with pytest.raises(SlowTemplate):
        template.render(TURNS, {"n": 10_000}, seconds=LOOP_SECONDS)
    # More than it needs: a collection of garbage counts as the template's time.
    assert template.render(TURNS, {"n": 10}, seconds=1.0) == ""


@pytest.mark.parametrize("failure", ["1 / 0", "'%(x)s' % {}", "''.join(7)", "messages[0].content.index('none')"])
def test_a_template_that_fails_on_one_conversation_says_so_to_its_client(failure: str) -> None:
    template = "{% if messages | length > 1 %}{{ " + failure + " }}{% endif %}"
    with pytest.raises(InvalidRequest, match="chat template"):
        ChatTemplate(template, {}).render(TURNS, {})


def test_products_and_loops_of_ordinary_size_are_rendered() -> None:
    template = (
        "{{ '-' * 3 }}{{ 2 ** 3 }}{{ 2.0 * 3 }}{% for a in [1, 2] recursive %}{{ loop.length }}{{ a }}{% endfor %}"
    )
    assert ChatTemplate(template, {}).render(TURNS, {}) == "---86.02122"
