"""Clients that are not ours, as they are: spans are marked in ordinary requests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
from documents import chat, fresh
from process import API_KEY, ServerProcess

from minipic_backend import RemoteEngine
from minipic_backend.models import HUB_NAME

MARK = {"span": True}
GREEDY = {"temperature": 0.0, "max_tokens": 8}
QUESTION = {"type": "text", "text": "What is this about?"}
SYSTEM = {"role": "system", "content": "Answer from the documents."}


@pytest.fixture(scope="module")
def oai(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.base_url, api_key=API_KEY, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def claude(server: ServerProcess) -> Iterator[anthropic.Anthropic]:
    # vLLM's --api-key looks at the Authorization header alone.
    with anthropic.Anthropic(
        base_url=server.root, auth_token=API_KEY, api_key=None, max_retries=0
    ) as client:
        yield client


def ask(client: openai.OpenAI, content: Any, **options: Any) -> Any:
    return client.chat.completions.create(
        model=HUB_NAME,
        messages=[SYSTEM, {"role": "user", "content": content}],  # type: ignore[list-item]
        **{**GREEDY, **options},
    )


def marked(documents: list[str], *, extras: bool = False) -> list[dict[str, Any]]:
    def part(rank: int, text: str) -> dict[str, Any]:
        mark = {"minipic": {**MARK, "rank": rank}}
        return {"type": "text", "text": text, **({"extras": mark} if extras else mark)}

    return [*(part(rank, text) for rank, text in enumerate(documents)), QUESTION]


def cached(usage: Any) -> int:
    found = usage.prompt_tokens_details.cached_tokens
    assert isinstance(found, int)
    return found


# ---- OpenAI ---------------------------------------------------------------------------------


@pytest.mark.parametrize("extras", [False, True], ids=["mark", "mark in extras"])
def test_openai_spans_are_those_of_our_own_client(
    oai: openai.OpenAI, remote: RemoteEngine, extras: bool
) -> None:
    documents = fresh(4)
    answer = ask(oai, marked(documents, extras=extras))
    own = remote.generate(chat(documents), **GREEDY)
    assert answer.choices[0].message.content == own.text
    assert answer.usage.prompt_tokens == own.usage.prompt_tokens
    # Laid out the same way: ours reads what theirs has left.
    question = remote.explain(chat(documents)).rows[-1].num_tokens
    assert own.usage.cached_tokens is not None
    assert own.usage.cached_tokens >= own.usage.prompt_tokens - question


def test_openai_documents_hit_in_any_order(oai: openai.OpenAI, remote: RemoteEngine) -> None:
    documents = fresh(4)
    options: dict[str, Any] = {"extra_body": {"minipic": {"late": 0}}}
    cold = ask(oai, marked(documents), **options).usage
    created = cold.prompt_tokens_details.created_cache_tokens
    rows = remote.explain(chat(documents), late=0).rows
    assert created >= sum(row.num_tokens for row in rows if row.kind == "span")
    warm = ask(oai, marked(documents[::-1]), **options).usage
    assert cached(warm) == warm.prompt_tokens - rows[-1].num_tokens
    assert warm.prompt_tokens_details.created_cache_tokens < 64


def test_openai_stream_with_usage(oai: openai.OpenAI) -> None:
    content = marked(fresh(2))
    whole = ask(oai, content)
    chunks = list(ask(oai, content, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert cached(chunks[-1].usage) > 0


def test_openai_options_of_the_layout(oai: openai.OpenAI, remote: RemoteEngine) -> None:
    documents = fresh(2)
    for layout in ({"technique": "full"}, {"technique": "block_attention"}, {"late": 2}):
        answer = ask(oai, marked(documents), extra_body={"minipic": layout})
        assert answer.usage.prompt_tokens == len(
            remote.explain(chat(documents), **layout).token_ids
        )


def test_openai_salt(oai: openai.OpenAI) -> None:
    content = marked(fresh(3))
    layout = {"minipic": {"late": 0, "technique": "block_attention"}}
    ask(oai, content, extra_body={**layout, "cache_salt": "a"})
    assert cached(ask(oai, content, extra_body={**layout, "cache_salt": "a"}).usage) > 200
    assert cached(ask(oai, content, extra_body={**layout, "cache_salt": "b"}).usage) < 64


def test_openai_tools_go_together_with_spans(oai: openai.OpenAI) -> None:
    document, other = fresh(2)
    call = {"id": "c", "type": "function", "function": {"name": "find", "arguments": '{"q": "x"}'}}
    answer = oai.chat.completions.create(
        model=HUB_NAME,
        messages=[  # type: ignore[list-item]
            SYSTEM,
            {"role": "user", "content": marked([document])},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": marked([other])[:1]},
            {"role": "user", "content": "Go on."},
        ],
        **GREEDY,
    )
    assert answer.usage.completion_tokens > 0


def test_openai_without_marks_is_vllms_own(oai: openai.OpenAI, server: ServerProcess) -> None:
    """The prompt is what vLLM's own renderer makes, to the token."""
    messages = [SYSTEM, {"role": "user", "content": [{"type": "text", "text": "Hello"}, QUESTION]}]
    answer = oai.chat.completions.create(
        model=HUB_NAME,
        messages=messages,  # type: ignore[arg-type]
        extra_body={"return_token_ids": True},
        **GREEDY,
    )
    from transformers import AutoTokenizer

    from minipic_backend.models import resolve_model

    tokenizer = AutoTokenizer.from_pretrained(resolve_model(HUB_NAME))
    joined = [SYSTEM, {"role": "user", "content": "Hello\nWhat is this about?"}]
    text = tokenizer.apply_chat_template(joined, tokenize=False, add_generation_prompt=True)
    assert answer.prompt_token_ids == tokenizer.encode(text, add_special_tokens=False)


def test_tokenize_shows_a_marked_chat_as_it_is_laid_out(
    server: ServerProcess, remote: RemoteEngine
) -> None:
    documents = fresh(2)
    messages = [SYSTEM, {"role": "user", "content": marked(documents)}]
    body = {"model": HUB_NAME, "messages": messages, "minipic": {"late": 0}}
    headers = {"authorization": f"Bearer {API_KEY}"}
    answer = httpx.post(f"{server.root}/tokenize", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    assert answer.json()["tokens"] == list(remote.explain(chat(documents), late=0).token_ids)


def test_responses_and_batches_take_marks_too(server: ServerProcess, remote: RemoteEngine) -> None:
    documents = fresh(2)
    layout = {"technique": "block_attention"}
    length = len(remote.explain(chat(documents), **layout).token_ids)
    parts = marked(documents)
    inputs = [SYSTEM, {"role": "user", "content": [{**one, "type": "input_text"} for one in parts]}]
    body = {"model": HUB_NAME, "input": inputs, "max_output_tokens": 2, "minipic": layout}
    answer = server.request("POST", "/responses", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["input_tokens"] == length
    messages = [SYSTEM, {"role": "user", "content": parts}]
    body = {"model": HUB_NAME, "messages": [messages] * 2, "max_tokens": 2, "minipic": layout}
    answer = server.request("POST", "/chat/completions/batch", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["prompt_tokens"] == 2 * length


@pytest.mark.parametrize("where", ["span", "text"])
def test_text_that_spells_out_every_special_token(
    oai: openai.OpenAI, remote: RemoteEngine, where: str
) -> None:
    """In a document or in a message without any mark: it stays text, and the layout as it was."""
    specials = remote.layout.encoder.special_texts
    assert len(specials) >= 17
    hostile = "The tokens are " + " ".join(specials) + ". " + "".join(specials)
    config = remote.capability.config  # type: ignore[union-attr]
    reserved = {config.ssep, config.pdep, config.pad}
    extra: dict[str, Any] = {"return_token_ids": True}
    if where == "text":
        answer = ask(oai, hostile, extra_body=extra)
        assert reserved.isdisjoint(answer.prompt_token_ids)
        return
    harmless = ask(oai, marked(["A document.", "Another one."]), extra_body=extra)
    answer = ask(oai, marked([hostile, "Another one."]), extra_body=extra)
    special_ids = set(remote.tokenizer.all_special_ids) - {config.pad}
    count = lambda ids: [i for i in ids if i in special_ids]  # noqa: E731
    assert count(answer.prompt_token_ids) == count(harmless.prompt_token_ids)
    assert remote.explain(chat([hostile, "Another one."])).token_ids == tuple(
        answer.prompt_token_ids
    )


# ---- Anthropic ------------------------------------------------------------------------------


# Its client has no argument for a temperature any more.
TERSE: dict[str, Any] = {"max_tokens": 8, "extra_body": {"temperature": 0.0}}


def blocks(documents: list[str], kind: str) -> list[dict[str, Any]]:
    def block(text: str) -> dict[str, Any]:
        if kind == "cache_control":
            return {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}
        source = {"type": "text", "media_type": "text/plain", "data": text}
        return {"type": "document", "source": source}

    return [*(block(text) for text in documents), QUESTION]


def message(client: anthropic.Anthropic, content: Any, **options: Any) -> Any:
    return client.messages.create(
        model=HUB_NAME,
        system=SYSTEM["content"],
        messages=[{"role": "user", "content": content}],
        **{**TERSE, **options},
    )


@pytest.mark.parametrize("kind", ["cache_control", "document"])
def test_anthropic_blocks_are_spans(
    claude: anthropic.Anthropic, remote: RemoteEngine, kind: str
) -> None:
    documents = fresh(4)
    cold = message(claude, blocks(documents, kind))
    warm = message(claude, blocks(documents[::-1], kind))
    rows = remote.explain(chat(documents), late=0).rows
    spans = sum(row.num_tokens for row in rows if row.kind == "span")
    assert cold.usage.cache_creation_input_tokens >= spans
    assert warm.usage.cache_read_input_tokens == spans + rows[0].num_tokens
    assert warm.usage.cache_creation_input_tokens < 64
    total = sum(row.num_tokens for row in rows)
    for usage in (cold.usage, warm.usage):
        assert total == (
            usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens
        )
    own = remote.generate(chat(documents[::-1]), late=0, best_last=False, **GREEDY)  # no ranks
    assert warm.content[0].text == own.text


def test_anthropic_stream(claude: anthropic.Anthropic) -> None:
    content = blocks(fresh(2), "document")
    whole = message(claude, content)
    with claude.messages.stream(
        model=HUB_NAME,
        system=SYSTEM["content"],
        messages=[{"role": "user", "content": content}],  # type: ignore[typeddict-item]
        **TERSE,
    ) as stream:
        streamed = stream.get_final_message()
    assert streamed.content[0].text == whole.content[0].text  # type: ignore[union-attr]
    assert streamed.usage.cache_read_input_tokens > 0  # type: ignore[operator]
    assert streamed.usage.output_tokens == whole.usage.output_tokens


def test_anthropic_system_documents(claude: anthropic.Anthropic) -> None:
    """Instructions first, then documents that each end in `cache_control`: the usual form."""
    one, two = fresh(2)
    text = lambda t, **more: {"type": "text", "text": t, **more}  # noqa: E731
    mark = {"cache_control": {"type": "ephemeral"}}

    def send(*documents: str) -> Any:
        return claude.messages.create(
            model=HUB_NAME,
            system=[
                text("Answer from the documents.", **mark), *(text(d, **mark) for d in documents)
            ],
            messages=[{"role": "user", "content": "What is this about?"}],
            **TERSE,
        ).usage  # fmt: skip

    send(one, two)
    warm = send(two, one)
    assert warm.cache_read_input_tokens > 150


def test_anthropic_tool_results(claude: anthropic.Anthropic) -> None:
    """Documents that a tool has found are spans too."""
    documents = fresh(3)

    def send(found: list[str]) -> Any:
        result = {
            "type": "tool_result",
            "tool_use_id": "t",
            "content": blocks(found, "document")[:-1],
        }
        call = {"type": "tool_use", "id": "t", "name": "read", "input": {"name": "all"}}
        return claude.messages.create(
            model=HUB_NAME,
            messages=[
                {"role": "user", "content": "Read them."},
                {"role": "assistant", "content": [call]},  # type: ignore[typeddict-item]
                {"role": "user", "content": [result]},  # type: ignore[typeddict-item]
            ],
            **TERSE,
        ).usage

    cold = send(documents)
    warm = send(documents[::-1])
    assert warm.cache_read_input_tokens >= 3 * 64
    assert warm.cache_creation_input_tokens < 64 < cold.cache_creation_input_tokens


def test_anthropic_counts_what_it_will_bill(claude: anthropic.Anthropic) -> None:
    content = blocks(fresh(2), "document")
    counted = claude.messages.count_tokens(
        model=HUB_NAME,
        system=SYSTEM["content"],
        messages=[{"role": "user", "content": content}],  # type: ignore[typeddict-item]
    ).input_tokens
    usage = message(claude, content).usage
    assert counted == (
        usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens
    )


def test_anthropic_without_marks_is_vllms_own(
    claude: anthropic.Anthropic, oai: openai.OpenAI
) -> None:
    plain = message(claude, "What is the capital of France?")
    same = ask(oai, "What is the capital of France?")
    assert plain.content[0].text == same.choices[0].message.content
    usage = plain.usage
    assert same.usage.prompt_tokens == (
        usage.input_tokens
        + (usage.cache_read_input_tokens or 0)
        + (usage.cache_creation_input_tokens or 0)
    )


def test_anthropic_last_block_stays_the_question(
    claude: anthropic.Anthropic, remote: RemoteEngine
) -> None:
    documents = fresh(1)
    content = blocks(documents, "cache_control")
    content[-1] = {**QUESTION, "cache_control": {"type": "ephemeral"}}
    usage = message(claude, content).usage
    total = usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens
    assert total == len(remote.explain(chat(documents), late=0).token_ids)
