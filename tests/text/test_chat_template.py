"""Chat templates: rendering, where they are found, and what a bad or hostile one gets."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

import tiny
from cutaway.checkpoints import hub, open_checkpoint
from cutaway.core.errors import BadRequest, CheckpointError
from cutaway.text import budget
from cutaway.text.chat import ChatTemplate
from cutaway.text.tokenizer import Tokenizer

USER = [{"role": "user", "content": "Hé <b>"}]
LLAMA_2 = (
    "{{ bos_token }}{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate user/assistant') }}{% endif %}"
    "{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'].strip() + ' [/INST]' }}"
    "{% else %}{{ m['content'] + eos_token }}{% endif %}{% endfor %}"
)


def folder(tmp_path: Path, template: Any) -> Path:
    path = tiny.write_folder(tmp_path, "llama")
    values = json.loads((path / "tokenizer_config.json").read_text()) | {"chat_template": template}
    (path / "tokenizer_config.json").write_text(json.dumps(values))
    return path


def test_the_tiny_models_template_from_gguf_and_folder(tmp_path: Path) -> None:
    expected = "<|im_start|>user\nHé <b><|im_end|>\n<|im_start|>assistant\n"
    for path in (tiny.write_gguf(tmp_path / "m.gguf", "llama"), tiny.write_folder(tmp_path / "f", "llama")):
        template = ChatTemplate.open(open_checkpoint(path).text())
        assert template.render(USER) == expected
        assert template.render(USER, add_generation_prompt=False) == expected.removesuffix("<|im_start|>assistant\n")


def test_a_template_is_a_string_a_named_list_or_a_file(tmp_path: Path) -> None:
    path = folder(tmp_path, [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}])
    assert open_checkpoint(path).text().chat_template == "plain"
    assert open_checkpoint(folder(tmp_path, [{"name": "rag", "template": "only"}])).text().chat_template == "only"
    assert open_checkpoint(folder(tmp_path, "a string")).text().chat_template == "a string"
    (path / "chat_template.jinja").write_text("a file é", encoding="utf-8")
    assert open_checkpoint(path).text().chat_template == "a file é"
    (path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match=r"chat_template.jinja: cannot be read as UTF-8"):
        open_checkpoint(path).text()
    (path / "chat_template.jinja").unlink()
    for nothing in (None, [], 7, ""):
        assert open_checkpoint(folder(tmp_path, nothing)).text().chat_template is None


def test_special_tokens_and_bos_exactly_once(tmp_path: Path) -> None:
    assets = open_checkpoint(folder(tmp_path, LLAMA_2)).text()
    text = ChatTemplate.open(assets).render(USER)
    assert text == "<|im_start|>[INST] Hé <b> [/INST]"
    ids = Tokenizer.open(assets).encode_rendered(text)
    assert ids[0] == 1 and ids.count(1) == 1


def test_whitespace_json_dates_and_extensions() -> None:
    assert ChatTemplate("{% if true %}\n  a\n  {% endif %}\nb").render(USER) == "  a\nb"
    assert ChatTemplate("{{ messages | tojson }}").render(USER) == '[{"role": "user", "content": "Hé <b>"}]'
    assert ChatTemplate("{{ {'b': 1} | tojson(indent=2) }}").render(USER) == '{\n  "b": 1\n}'
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", ChatTemplate("{{ strftime_now('%Y-%m-%d') }}").render(USER))
    assert ChatTemplate("{% for i in range(9) %}{{ i }}{% if i == 2 %}{% break %}{% endif %}{% endfor %}").render(USER) == "012"
    assert ChatTemplate("{% generation %}x{% endgeneration %}").render(USER) == "x"
    assert (
        ChatTemplate("{{ enable_thinking }}{{ tools is none }}").render(USER, enable_thinking=False, tools=None) == "FalseTrue"
    )
    loop = "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ loop.last }} {% endfor %}"
    assert ChatTemplate(loop).render(USER * 2) == "1/2False 2/2True "
    assert (
        ChatTemplate("{% for k, v in messages[0].items() %}{{ k ~ '=' ~ v }};{% endfor %}").render(USER)
        == "role=user;content=Hé <b>;"
    )
    assert (
        ChatTemplate(
            "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}"
        ).render(USER)
        == "1"
    )
    assert ChatTemplate("{{ '{0.__class__}'.format(1) }}").render(USER) == ""
    assert ChatTemplate("{{ 'a'.replace('a', 'bc') }}{{ '%s' }}{{ '{}-{}'.format(1, 2) }}").render(USER) == "bc%s1-2"


def test_the_messages_are_not_changed() -> None:
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(BadRequest):
        ChatTemplate("{{ messages.append(1) }}").render(messages)
    assert messages == [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (None, "this model has no chat template"),
        ("{{ raise_exception('No\nsystem role') }}", "the model's chat template refuses these messages: No system role"),
        ("{% if %}", "the model's chat template is not valid (line 1)"),
        ("{% include 'x' %}", "is not valid (line 1): include is not allowed"),
        ("{{ messages[0]['x'] + 'a' }}", "cannot render these messages: 'dict object' has no attribute 'x'"),
        ("{{ nothing.more }}", "cannot render these messages: 'nothing' is undefined"),
        ("{{ 1 / 0 }}", "cannot render these messages: division by zero"),
        ("{{ messages | tojson(indent='x', sort_keys=messages) | int + 'a' }}", "cannot render these messages"),
        ("{{ ''.__class__.__mro__ }}", "was stopped: access to attribute '__class__'"),
        ("{{ messages.__init__.__globals__ }}", "was stopped"),
        ("{{ cycler.__init__.__globals__.os.system('id') }}", "was stopped"),
    ],
)
def test_a_template_that_fails_is_a_bad_request_in_one_line(source: str | None, message: str) -> None:
    with pytest.raises(BadRequest) as caught:
        ChatTemplate(source).render(USER)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert caught.value.param == "messages" and caught.value.status == 400


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
        "{% for i in range(100000) %}{% for j in range(100000) %}x{% endfor %}{% endfor %}",
        "{% for i in range(10000000) %}{% endfor %}",
        "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
        "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% set ns = namespace(x='ab') %}{% for i in range(90) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
        "{% set ns = namespace(x='ab') %}{% for i in range(90) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x }}",
        "{% set ns = namespace(x='ab') %}{% for i in range(90) %}{% set ns.x = ns.x.replace('b', ns.x) %}{% endfor %}",
        "{{ 'a' * 10 ** 12 }}",
        "{{ 'a' * 1000000000000 }}",
        "{{ [1] * 1000000000000 }}",
        "{{ 1000000000 * 'a' }}",
        "{{ 9 ** 9 ** 9 }}",
        "{{ '%1000000000d' % 3 }}",
        "{{ '{:1000000000d}'.format(3) }}",
        "{{ '{:{w}}'.format(3, w=1000000000) }}",
        "{{ 'a'.rjust(1000000000) }}",
        "{{ 'a' | center(1000000000) }}",
    ],
)
def test_a_template_without_end_is_stopped(source: str) -> None:
    start = time.perf_counter()
    with pytest.raises(BadRequest):
        ChatTemplate(source).render(USER)
    assert time.perf_counter() - start < 10


def test_a_template_that_takes_too_long_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "_SECONDS", 0.0)
    with pytest.raises(BadRequest, match="does not come to an end"):
        ChatTemplate("{% for i in range(9) %}x{% endfor %}").render(USER)


def test_long_chats_are_within_the_budget() -> None:
    messages = [{"role": "user" if index % 2 == 0 else "assistant", "content": "x" * 100} for index in range(5001)]
    assert len(ChatTemplate(LLAMA_2, {"bos_token": "<s>", "eos_token": "</s>"}).render(messages)) > 500_000


@pytest.mark.model
def test_the_built_in_models_template() -> None:
    assets = open_checkpoint(hub.models_folder() / hub.BUILTIN[0].file).text()
    text = ChatTemplate.open(assets).render([{"role": "user", "content": "Hi"}])
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = Tokenizer.open(assets).encode_rendered(text)
    assert ids[:6] == [1, 9690, 198, 2683, 359, 253] and ids[-4:] == [198, 1, 520, 9531, 198][-4:] and len(ids) == 31
