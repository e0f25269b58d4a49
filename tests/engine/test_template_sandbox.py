"""A checkpoint's chat template is a program of a stranger: it is run in transformers' sandbox."""

import json
import shutil

import pytest

from cairn.engine.text.tokenizer import ModelTokenizer
from cairn.errors import InvalidRequest

USER = {"role": "user", "content": "What is a cairn?"}


@pytest.fixture
def templated(plain_tokenizer, tmp_path):
    folder = shutil.copytree(plain_tokenizer, tmp_path / "tokenizer")
    config = folder / "tokenizer_config.json"

    def with_template(template):
        config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": template}))
        return ModelTokenizer(folder)

    return with_template


@pytest.mark.parametrize(
    "template",
    [
        "{{ cycler.__init__.__globals__.os.mkdir('MARK') }}",
        "{{ lipsum.__globals__['os'].mkdir('MARK') }}",
        "{{ ''.__class__.__mro__[1].__subclasses__()[0] }}",
        "{{ messages.append({}) }}",
        "{{ messages[0].update(role='system') }}",
        "{{ ''.format.__self__.__class__.mro() }}",
        "{{ 1 // (messages | length - 1) }}",
        "{% for i in range(1000000000) %}x{% endfor %}",
        "{{ '{0.__class__.__mro__[1]}'.format('').upper().foo() }}",
    ],
)
def test_a_template_gets_at_nothing(templated, tmp_path, template):
    with pytest.raises(InvalidRequest, match="the chat template refuses these messages"):
        templated(template.replace("MARK", str(tmp_path / "mark"))).render_chat([dict(USER)])
    assert not (tmp_path / "mark").exists()


def test_messages_are_never_templates(templated):
    """What a client writes is text, however much it looks like a program."""
    text = "{{ 7 * 7 }}{% for x in range(3) %}x{% endfor %}"
    tokenizer = templated("{% for m in messages %}{{ m.content }}{% endfor %}")
    rendered = tokenizer.render_chat([USER | {"content": text}])
    assert tokenizer.decode(rendered.token_ids) == text


def test_a_template_is_given_the_variables_that_it_reads(templated):
    tokenizer = templated(
        "{% set mine = 1 %}{% if style is defined %}{{ style.tone }}{% endif %}{{ mine }}{{ bos_token }}"
        "{% generation %}{{ effort }}{% endgeneration %}{% for m in messages %}{{ m.content }}{% break %}{% endfor %}"
    )

    def text_of(**sent):
        return tokenizer.decode(tokenizer.render_chat([USER], template_kwargs=sent).token_ids)

    bare = text_of()
    assert text_of(style={"tone": "dry"}, effort="low") == bare.replace("What", "lowWhat").replace("1", "dry1", 1)
    assert text_of(unread=1, max_length=1, tokenize=True, padding="x") == bare
    assert text_of(mine=2) == bare, "what a template sets itself is no variable of a client's"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for %}", "end of statement"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ raise_exception('no') }}", "no"),
    ],
)
def test_a_clients_template_is_run_in_the_same_sandbox(templated, template, words):
    with pytest.raises(InvalidRequest, match=words) as caught:
        templated("x").render_chat([USER], chat_template=template)
    assert caught.value.param == "chat_template"


def test_a_clients_template_stands_in_for_the_checkpoints(templated):
    """Also where that has none, and for the ends of messages."""
    template = "{% for m in messages %}<{{ m.content }}>{{ mark }}{% endfor %}"
    own = templated(template).render_chat([USER, USER], template_kwargs={"mark": "!"})
    brought = templated("{{ '?' }}").render_chat([USER, USER], template_kwargs={"mark": "!"}, chat_template=template)
    assert brought == own and own.boundaries
    assert templated(None).render_chat([USER, USER], template_kwargs={"mark": "!"}, chat_template=template) == own


def test_reasoning_that_a_template_refuses_beside_a_text_is_left_out(templated):
    """As gpt-oss's does in a message with calls. It reads the reasoning as `thinking`."""
    refusing = (
        "{% for m in messages %}{% if m.content and m.thinking and m.tool_calls %}{{ raise_exception('both') }}"
        "{% endif %}[{{ m.thinking }}|{{ m.content }}]{% endfor %}"
    )
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    answer = {"role": "assistant", "reasoning_content": "hm", "content": "So.", "tool_calls": [call]}
    silent = answer | {"content": ""}

    def text_of(tokenizer, *messages):
        return tokenizer.decode(tokenizer.render_chat([USER, *messages]).token_ids)

    assert text_of(templated(refusing), answer, silent).endswith("[|So.][hm|]")
    assert text_of(templated(refusing.replace("{{ raise_exception('both') }}", "")), answer).endswith("[hm|So.]")
