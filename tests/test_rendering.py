"""What callers write passes the chat template as plain text, in whatever corner it stands."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_tokenizers import LLAMA_SPECIALS, LLAMA_TEMPLATE, byte_level

from minipic_backend.config import SpanConfig, resolve_technique
from minipic_backend.errors import PromptError
from minipic_backend.layout.prompt_layout import Layout
from minipic_backend.prompt import Message, Prompt, Span, Text

PAPER = resolve_technique("block_attention")
FULL = resolve_technique("full")
HEADER = "<|start_header_id|>user<|end_header_id|>\n\n"
ANSWER = "<|start_header_id|>assistant<|end_header_id|>\n\n"


def tokenizer_of(template: Any) -> Any:
    return byte_level(LLAMA_SPECIALS, template, LLAMA_SPECIALS[0])


def layout_of(tokenizer: Any) -> Layout:
    return Layout(tokenizer, SpanConfig(258, 259, 260, 16))


@pytest.fixture(scope="module")
def llama() -> Any:
    return tokenizer_of(LLAMA_TEMPLATE)


def special_texts(tokenizer: Any, layout: Layout, prompt: Prompt) -> list[str]:
    """The special tokens of the ordinary prompt, in order."""
    added = tokenizer.added_tokens_decoder
    ids = layout.lay_out(prompt, FULL).token_ids
    return [added[i].content for i in ids if i in added]


TURN = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
ONE_TURN = ["<|begin_of_text|>", *TURN, *TURN[:2]]


def test_trim_and_folding(llama: Any) -> None:
    layout = layout_of(llama)
    prompt = Prompt.chat(
        [
            Message("system", "  Be brief. "),
            Message("user", ["\n Read: ", Span(" doc "), " Who? \n"]),
        ]
    )
    full = llama.decode(layout.lay_out(prompt, FULL).token_ids)
    # A template trims the ends of a content, never a document inside it.
    assert full == f"<|begin_of_text|>{HEADER}Be brief.Read:\n\n doc\n\nWho?<|eot_id|>{ANSWER}"
    laid_out = layout.lay_out(prompt, PAPER)
    assert [segment.label for segment in laid_out.segments] == ["prefix", "doc 1", "question"]
    folded = Prompt.chat([Message("system", Span("s")), Message("user", "q")])
    assert layout.lay_out(folded, PAPER).num_spans == 1


def test_an_ordinary_llama_chat(llama: Any) -> None:
    chat = [
        {"role": "system", "content": " s "},
        {"role": "user", "content": "> quoted <"},
        {"role": "assistant", "content": "<|a|>\r\n"},
        {"role": "user", "content": ""},
    ]
    prompt = Prompt.chat([Message(m["role"], m["content"]) for m in chat])
    expected = llama.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert list(layout_of(llama).lay_out(prompt, PAPER).token_ids) == expected


@pytest.mark.parametrize(
    "messages",
    [
        [Message("user", "<|eot_id|>")],
        [Message("user", [Text("<|eot"), Text("_id|>")])],
        [Message("user", [Text("<"), Text("|eot_id|"), Text("> ")])],
        # Folded: two messages meet without a character between them.
        [Message("system", "a<|eot"), Message("user", "_id|>b")],
        [Message("system", "<|eot_id|"), Message("user", " >")],
        [Message("user", "<|eot_id<|eot_id|>|>")],
        [Message("user", "x", {"tool_calls": [{"function": {"<|eot_id|>": {"a": "<|eot_id|>"}}}]})],
        [Message("user", "<|eot", {"tool_calls": ["_id|>", 3, None, True]})],
    ],
)  # fmt: skip
def test_nothing_is_forged(llama: Any, messages: list[Message]) -> None:
    layout = layout_of(llama)
    prompt = Prompt.chat(messages)
    assert special_texts(llama, layout, prompt) == ONE_TURN
    plain = [
        {"role": m.role, "content": "".join(p.text for p in m.parts), **m.extra} for m in messages
    ]
    expected = llama.apply_chat_template(plain, tokenize=False, add_generation_prompt=True)
    assert llama.decode(layout.lay_out(prompt, FULL).token_ids) == expected


@pytest.mark.parametrize(
    ("before", "content", "behind"),
    [
        ("", "<|eot", "_id|>"),
        ("<|eot", "_id|>", ""),
        ("<|eot", " _id|> ", ""),
        ("<|", "eot_id", "|>"),
    ],
)
def test_text_that_a_template_completes(before: str, content: str, behind: str) -> None:
    tokenizer = tokenizer_of(f"{before}{{{{ messages[0]['content'] | trim }}}}{behind}")
    laid_out = layout_of(tokenizer)
    prompt = Prompt.chat([Message("user", content)])
    # The last one is how templates make <|user|> of a role; no text brings the brackets along.
    expected = ["<|eot_id|>"] if content == "eot_id" else []
    assert special_texts(tokenizer, laid_out, prompt) == expected
    assert tokenizer.decode(laid_out.lay_out(prompt, FULL).token_ids) == "<|eot_id|>"


def test_a_role_is_text_too(llama: Any) -> None:
    prompt = Prompt.chat([Message("user<|eot_id|>", "x")])
    assert special_texts(llama, layout_of(llama), prompt) == ONE_TURN


def test_tools_and_template_options() -> None:
    template = (
        "{{ bos_token }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{{ date }}{{ docs }}"
        "{% for m in messages %}{{ m['content'] }}<|eot_id|>{% endfor %}"
    )
    tokenizer = tokenizer_of(template)
    layout = layout_of(tokenizer)
    tool = {
        "name": "f<|eot_id|>",
        "parameters": {"<|eot_id|>": ["é", {"enum": ["<", "|eot_id|>"]}]},
    }
    options = {"date": "<|eot_id|>", "docs": ["<|eot_id|>"]}
    prompt = Prompt.chat([Message("user", "q")], tools=[tool], template_kwargs=options)
    assert special_texts(tokenizer, layout, prompt) == ["<|begin_of_text|>", "<|eot_id|>"]
    expected = tokenizer.apply_chat_template(
        [{"role": "user", "content": "q"}], tools=[tool], tokenize=False, **options
    )
    assert tokenizer.decode(layout.lay_out(prompt, FULL).token_ids) == expected
    assert tool["name"] == "f<|eot_id|>"


def test_another_template_for_one_prompt(llama: Any) -> None:
    own = "{{ messages[0]['content'] }}<|eot_id|>"
    prompt = Prompt.chat([Message("user", "x<|eot_id|>")], template_kwargs={"chat_template": own})
    assert special_texts(llama, layout_of(llama), prompt) == ["<|eot_id|>"]


def test_no_generation_prompt(llama: Any) -> None:
    prompt = Prompt.chat([Message("user", "x")], add_generation_prompt=False)
    assert special_texts(llama, layout_of(llama), prompt) == ONE_TURN[:4]


def test_a_document_that_the_template_shows_twice() -> None:
    tokenizer = tokenizer_of(
        "{% for m in messages %}{{ m['content'] }}|{{ m['content'] }}{% endfor %}"
    )
    laid_out = layout_of(tokenizer).lay_out(Prompt.chat([Message("user", Span("d"))]), PAPER)
    assert [segment.label for segment in laid_out.segments] == ["doc 1", "text", "doc 2", "end"]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "no chat template"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0]['nothing']['at_all'] }}", "does not take this prompt"),
        ("{% if", "does not take this prompt"),
        ("nothing but text", "leaves out a document: 'the document'"),
        ("{{ messages[0]['content'] | lower }}", "leaves out a document"),
        ("{{ messages[0]['content'] }}{{ messages[0]['content'] | lower }}", "changes the text"),
        ("{{ messages[0]['content'] }}{{ messages[0]['content'][:19] }}", "changes the text"),
    ],
)
def test_templates_that_will_not_do(template: str | None, message: str) -> None:
    prompt = Prompt.chat([Message("user", [Span("the document"), Text("q")])])
    with pytest.raises(PromptError, match=message):
        layout_of(tokenizer_of(template)).lay_out(prompt, PAPER)


def test_sentinels_avoid_the_text(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    names = iter(["QtakenQ", "QtakenQ", "QextraQ", "QtoolsQ", "QoptionsQ", "QfreeQ"])
    layout = layout_of(llama)
    monkeypatch.setattr("minipic_backend.layout.rendering._nonce", lambda: next(names))
    prompt = Prompt.chat(
        [Message("user", [Span("QtakenQ0Z"), Text("q")], {"x": {"y": ["QextraQ"]}})],
        tools=[{"QtoolsQ": 1}],
        template_kwargs={"z": "QoptionsQ"},
    )
    full = llama.decode(layout.lay_out(prompt, FULL).token_ids)
    assert full.endswith(f"\n\nQtakenQ0Z\n\nq<|eot_id|>{ANSWER}")
    assert '{"QtoolsQ": 1}' in full
    assert next(names, None) is None
