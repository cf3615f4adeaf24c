from __future__ import annotations

import datetime

import pytest

from engine.text.chat_template import ChatTemplate
from engine.text.tokenizer import Tokenizer
from tests.serving.demo import demo_tokenizer

MESSAGES = [{"role": "user", "content": "<a> & 'b'"}, {"role": "assistant", "content": "é"}]


def render(source: str, **variables) -> str:
    return ChatTemplate(source).render({"messages": MESSAGES, **variables})


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}\n  {% if m.role == 'user' %}\nU {{ m.content }}\n  {% endif %}\n{% endfor %}",
        "{{ messages | tojson }} {{ messages | tojson(indent=2) }}",
        "{% for m in messages %}{% if loop.index0 == 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
        "{% set ns = namespace(found=false) %}{% set ns.found = true %}{{ ns.found }}{{ tools is none }}",
    ],
)
def test_renders_like_transformers(source):
    from transformers.utils.chat_template_utils import render_jinja_template

    expected, _ = render_jinja_template([MESSAGES], chat_template=source)
    assert render(source, tools=None) == expected[0]


def test_strftime_now():
    assert render("{{ strftime_now('%Y') }}") == str(datetime.datetime.now().year)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('roles must\nalternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "concatenate"),
        ("{{ nothing.at.all }}", "undefined"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ range(10**9) | list }}", "range"),
    ],
)
def test_what_the_template_refuses_is_one_line(source, reason):
    with pytest.raises(ValueError, match="the chat template refused these messages") as caught:
        render(source)
    assert reason.lower() in str(caught.value).lower()
    assert "\n" not in str(caught.value)


def test_broken_template_names_the_line():
    with pytest.raises(ValueError, match="does not compile: line 2"):
        ChatTemplate("ok\n{% if %}")


def test_model_without_template():
    tokenizer = Tokenizer(demo_tokenizer().backend, (2,), 1, None)
    with pytest.raises(ValueError, match="has no chat template: use /v1/completions"):
        tokenizer.apply_chat_template(MESSAGES)


def test_kwargs_are_variables():
    tokenizer = Tokenizer(
        demo_tokenizer().backend, (2,), 1, "{{ enable_thinking }} {{ eos_token }}", {"eos_token": "E"}
    )
    assert tokenizer.render_chat([], enable_thinking=False) == "False E"
