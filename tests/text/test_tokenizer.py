"""Loading tokenizers, EOS ids and chat templates from Hugging Face folders."""

from __future__ import annotations

import json
import threading

import pytest
import tiny_tokenizers as tiny

from deepinfer_jax.text.tokenizer import Tokenizer, load_eos_token_ids, load_tokenizer

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%"
    " endfor %}\n{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}\n"
)
MESSAGES = [{"role": "user", "content": "hi"}]


def save(folder, backend=None, **files) -> str:
    (backend or tiny.byte_level()).save(str(folder / "tokenizer.json"))
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return str(folder)


def test_no_tokenizer_gives_none(tmp_path):
    assert load_tokenizer(tmp_path) is None
    assert load_tokenizer(tmp_path / "nowhere") is None


def test_encode_and_decode(tmp_path):
    tokenizer = load_tokenizer(save(tmp_path))
    for text in ("hello", "naïve 日本 👍", ""):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode_batch(["a", "bc"]) == [tokenizer.encode("a"), tokenizer.encode("bc")]
    assert tokenizer.vocab_size == 258
    assert tokenizer.id_to_token(-1) is None and tokenizer.id_to_token(9999) is None
    assert load_tokenizer(tmp_path / "tokenizer.json").vocab_size == 258


def test_half_a_surrogate_pair_is_a_value_error():
    tokenizer = Tokenizer(tiny.byte_level())
    with pytest.raises(ValueError, match=r"half a surrogate pair, \\ud83d, at character 4"):
        tokenizer.encode("cut \ud83d")
    with pytest.raises(ValueError, match="half a surrogate pair"):
        tokenizer.encode_batch(["fine", "\udc00"])


def test_saved_padding_and_truncation_do_not_alter_prompts(tmp_path):
    backend = tiny.byte_level()
    backend.enable_truncation(2)
    backend.enable_padding(length=10)
    assert len(load_tokenizer(save(tmp_path, backend)).encode("hello")) == 5


def test_broken_files_are_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"cannot read tokenizer .*tokenizer\.json"):
        load_tokenizer(tmp_path)
    save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json must hold a JSON object"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{,}")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json is not valid JSON"):
        load_tokenizer(tmp_path)


def test_eos_ids_generation_config_first(tmp_path):
    assert load_eos_token_ids(tmp_path) == ()
    (tmp_path / "config.json").write_text('{"eos_token_id": 5}')
    assert load_eos_token_ids(tmp_path) == (5,)
    (tmp_path / "generation_config.json").write_text("{}")
    assert load_eos_token_ids(tmp_path) == (5,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 8, 7]}')
    assert load_eos_token_ids(tmp_path) == (7, 8)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "7"}')
    with pytest.raises(ValueError, match=r"generation_config\.json: eos_token_id must be"):
        load_eos_token_ids(tmp_path)


def test_eos_falls_back_to_the_tokenizer_s_own(tmp_path):
    config = {"eos_token": {"content": "<|im_end|>"}, "bos_token": "<|im_start|>"}
    tokenizer = load_tokenizer(save(tmp_path, tokenizer_config=config))
    assert tokenizer.eos_token_ids == (257,) and tokenizer.bos_token_id == 256
    tokenizer = load_tokenizer(
        save(tmp_path, tokenizer_config=config, generation_config={"eos_token_id": [1, 2]})
    )
    assert (tokenizer.eos_token_ids, tokenizer.eos_token_id) == ((1, 2), 1)
    tokenizer = load_tokenizer(
        save(tmp_path, tokenizer_config={}, special_tokens_map=config, generation_config={})
    )
    assert tokenizer.eos_token_ids == (257,)


def test_chat_template_from_the_configuration(tmp_path):
    tokenizer = load_tokenizer(save(tmp_path, tokenizer_config={"chat_template": CHATML}))
    text = tokenizer.apply_chat_template(MESSAGES, tokenize=False)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer.apply_chat_template(MESSAGES)
    assert ids[0] == 256 and 257 in ids and tokenizer.decode(ids, skip_special_tokens=False) == text
    assert (
        tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=False, tokenize=False)
        == "<|im_start|>user\nhi<|im_end|>\n"
    )


@pytest.mark.parametrize("file", ["chat_template.jinja", "chat_template.jinja2"])
def test_chat_template_file_wins(tmp_path, file):
    save(tmp_path, tokenizer_config={"chat_template": CHATML})
    (tmp_path / file).write_text("from the file")
    assert load_tokenizer(tmp_path).apply_chat_template(MESSAGES, tokenize=False) == "from the file"


def test_named_chat_templates(tmp_path):
    named = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "{{ tools | tojson }}"},
    ]
    save(tmp_path, tokenizer_config={"chat_template": named})
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("rag")
    tokenizer = load_tokenizer(tmp_path)
    apply = lambda **kw: tokenizer.apply_chat_template(MESSAGES, tokenize=False, **kw)  # noqa: E731
    assert apply() == "plain"
    assert apply(tools=[{"é": "<&>"}]) == '[{"é": "<&>"}]'
    assert apply(chat_template="rag") == "rag"
    assert apply(chat_template="{{ x }}{{ bos_token | default('-') }}", x=3) == "3-"


def render(source: str, **kwargs) -> str:
    return Tokenizer(tiny.byte_level(), chat_templates={"default": source}).apply_chat_template(
        MESSAGES, tokenize=False, **kwargs
    )


def test_template_environment_is_transformers_like():
    assert (
        render(
            "{%- for m in messages %}\n    {%- if m.role == 'x' %}{% continue %}{% endif %}\n{{"
            " m.content }}\n{%- endfor %}"
        )
        == "hi"
    )
    assert (
        render("{% for m in [1, 2, 3] %}{% if m == 2 %}{% break %}{% endif %}{{ m }}{% endfor %}")
        == "1"
    )
    assert render("{% generation %}{{ messages[0].content }}{% endgeneration %}!") == "hi!"
    assert len(render("{{ strftime_now('%Y-%m-%d') }}")) == 10
    assert render("{{ {'b': 1, 'a': '<'} | tojson(indent=1) }}") == '{\n "b": 1,\n "a": "<"\n}'
    assert (
        render(
            "{{ bos_token is defined }}{{ tools is none }}{{ enable_thinking }}",
            enable_thinking=False,
        )
        == "FalseTrueFalse"
    )


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if %}", "line 1"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ messages[0].content + 1 }}", "str"),
    ],
)
def test_template_errors_are_value_errors_that_name_the_template(source, message):
    with pytest.raises(ValueError, match="chat template 'default'") as error:
        render(source)
    assert message in str(error.value)


@pytest.mark.parametrize("messages", ["hi", {"role": "user"}, [1], [{"content": "x"}], None])
def test_bad_messages(messages):
    with pytest.raises(ValueError, match="messages"):
        Tokenizer(tiny.byte_level(), chat_templates={"default": CHATML}).apply_chat_template(
            messages
        )


def test_missing_chat_template_says_what_to_do():
    with pytest.raises(
        ValueError, match="has no 'default' chat template; give prompts as plain text"
    ):
        Tokenizer(tiny.byte_level()).apply_chat_template(MESSAGES)


def test_threads_may_share_a_tokenizer(tmp_path):
    tokenizer = load_tokenizer(save(tmp_path, tokenizer_config={"chat_template": CHATML}))
    expected, results = tokenizer.apply_chat_template(MESSAGES), []
    threads = [
        threading.Thread(target=lambda: results.append(tokenizer.apply_chat_template(MESSAGES)))
        for _ in range(4)
    ]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert results == [expected] * 4


def test_chat_template_kwargs_are_keywords(tmp_path):
    template = "{{ messages[0].content }}{% if thinking %}!{% endif %}{{ bos_token }}"
    config = {"chat_template": template, "bos_token": "<|im_start|>"}
    tokenizer = load_tokenizer(save(tmp_path, tokenizer_config=config))
    apply = lambda **kw: tokenizer.apply_chat_template(MESSAGES, tokenize=False, **kw)  # noqa: E731
    assert apply() == "hi<|im_start|>"
    assert apply(thinking=True) == "hi!<|im_start|>"
    assert apply(chat_template_kwargs={"thinking": True}) == "hi!<|im_start|>"
    assert apply(thinking=True, chat_template_kwargs={"thinking": False}) == "hi<|im_start|>"
    assert apply(chat_template_kwargs={"bos_token": "B"}) == "hiB"
    with pytest.raises(ValueError, match=r"does not read the keyword\(s\) \['thinkin'\]"):
        apply(chat_template_kwargs={"thinkin": True})
    with pytest.raises(ValueError, match="must be a mapping"):
        apply(chat_template_kwargs="thinking")
    with pytest.raises(ValueError, match=r"must not hold \['messages'\]"):
        apply(chat_template_kwargs={"messages": []})
