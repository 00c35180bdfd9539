"""The server's answers against what the engine says itself, and its errors."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from http_server import Server

from deepinfer_jax import SamplingParams

PROMPT = "the sea "
GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}


def test_a_completion_is_what_the_engine_generates(server, llm):
    got = server.post("/v1/completions", GREEDY | {"model": "tiny", "prompt": PROMPT})
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    want = llm.generate(PROMPT, params, use_tqdm=False)[0]
    assert got["object"] == "text_completion" and got["model"] == "tiny"
    (choice,) = got["choices"]
    assert choice["text"] == want.outputs[0].text and choice["finish_reason"] == "length"
    prompt_tokens = len(want.prompt_token_ids)
    assert got["usage"] == {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": 12,
        "total_tokens": prompt_tokens + 12,
        "prompt_tokens_details": got["usage"]["prompt_tokens_details"],
    }


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"n": 3, "seed": 5, "temperature": 0.9},
        {"prompt": ["one", "two two", PROMPT], "n": 2, "seed": 1, "temperature": 1.1},
        {"prompt": [[5, 6, 7], [8, 9]], "logprobs": 2},
        {"stop": ["a", "b", "c"], "include_stop_str_in_output": True},
        {"echo": True},
        {"min_p": 0.1, "top_k": 7, "top_p": 0.9, "seed": 3, "temperature": 0.7},
        {"presence_penalty": 0.5, "frequency_penalty": 0.2, "logit_bias": {"40": 5.0}},
    ],
    ids=lambda more: ",".join(more) or "plain",
)
def test_a_stream_is_the_whole_in_pieces(server, more):
    body = GREEDY | {"prompt": PROMPT} | more
    whole = server.post("/v1/completions", body)
    events = server.events("/v1/completions", body | {"stream_options": {"include_usage": True}})
    assert events[-1]["choices"] == [] and events[-1]["usage"] == whole["usage"]
    assert len({e["id"] for e in events}) == 1
    for choice in whole["choices"]:
        parts = [c for e in events for c in e["choices"] if c["index"] == choice["index"]]
        assert "".join(c["text"] for c in parts) == choice["text"]
        assert [c["finish_reason"] for c in parts if c["finish_reason"]] == [
            choice["finish_reason"]
        ]
        if "logprobs" in more:
            for name, values in choice["logprobs"].items():
                got = [v for c in parts for v in c["logprobs"][name]]
                assert got == pytest.approx(values) if name == "token_logprobs" else got == values


def test_offsets_of_log_probabilities_point_into_the_text(server):
    body = GREEDY | {"prompt": [70, 71, 72], "logprobs": 1, "echo": True}
    choice = server.post("/v1/completions", body)["choices"][0]
    found = choice["logprobs"]
    assert found["token_logprobs"][0] is None and len(found["tokens"]) == 15
    lengths = [len(t) for t in found["tokens"]]
    assert found["text_offset"] == [sum(lengths[:i]) for i in range(15)]
    whole = server.post("/v1/completions", {"prompt": PROMPT, "logprobs": 0, "echo": True})
    (choice,) = whole["choices"]
    names, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
    for name, at in list(zip(names, offsets, strict=True))[: len(PROMPT)]:
        assert choice["text"][at : at + len(name)] == name != ""


def test_scoring_a_text_generates_nothing(server):
    """What evaluation programs do: echo, logprobs, no new token."""
    body = {"prompt": PROMPT, "max_tokens": 0, "echo": True, "logprobs": 1, "temperature": 0}
    got = server.post("/v1/completions", body)
    (choice,) = got["choices"]
    assert choice["text"] == PROMPT and got["usage"]["completion_tokens"] == 0
    stream = {"prompt": PROMPT, "max_tokens": 0, "stream_options": {"include_usage": True}}
    events = server.events("/v1/completions", stream)
    assert events[-1]["usage"]["completion_tokens"] == 0
    assert len(choice["logprobs"]["tokens"]) == got["usage"]["prompt_tokens"]


def test_a_chat_is_the_template_and_a_completion(server, llm):
    messages = [{"role": "user", "content": "hello"}]
    whole = server.post("/v1/chat/completions", GREEDY | {"messages": messages})
    (choice,) = whole["choices"]
    assert choice["message"]["role"] == "assistant"
    rendered = "<|im_start|>user\nhello<|im_end|><|im_start|>assistant\n"
    ids = llm.get_tokenizer().encode(rendered, add_special_tokens=False)
    plain = server.post("/v1/completions", GREEDY | {"prompt": ids})
    assert choice["message"]["content"] == plain["choices"][0]["text"]
    events = server.events("/v1/chat/completions", GREEDY | {"messages": messages})
    deltas = [e["choices"][0]["delta"] for e in events]
    assert deltas[0]["role"] == "assistant" and all("role" not in d for d in deltas[1:])
    assert "".join(d.get("content", "") for d in deltas) == choice["message"]["content"]


def test_log_probabilities_of_a_chat(server):
    body = GREEDY | {"messages": [{"role": "user", "content": "x"}]}
    got = server.post("/v1/chat/completions", body | {"logprobs": True, "top_logprobs": 2})
    content = got["choices"][0]["logprobs"]["content"]
    assert len(content) == 12 and all(len(c["top_logprobs"]) == 2 for c in content)
    assert all(c["logprob"] == c["top_logprobs"][0]["logprob"] for c in content)


BAD: list[tuple[str, dict[str, Any], int, str | None]] = [
    ("/v1/completions", {}, 400, "prompt"),
    ("/v1/completions", {"prompt": "x", "model": "other"}, 404, "model"),
    ("/v1/completions", {"prompt": "x", "nonsense": 1}, 400, "nonsense"),
    ("/v1/completions", {"prompt": "x", "suffix": "y"}, 400, "suffix"),
    ("/v1/completions", {"prompt": "x", "best_of": 3}, 400, "best_of"),
    ("/v1/completions", {"prompt": "x", "temperature": -1}, 400, None),
    ("/v1/completions", {"prompt": "x", "top_p": 7}, 400, None),
    ("/v1/completions", {"prompt": "x", "n": 0}, 400, "n"),
    ("/v1/completions", {"prompt": "x", "logit_bias": {"99999": 1.0}}, 400, None),
    ("/v1/completions", {"prompt": [99999]}, 400, None),
    ("/v1/completions", {"prompt": "x" * 300}, 400, "prompt"),
    ("/v1/completions", {"prompt": "\ud800"}, 400, None),
    ("/v1/chat/completions", {"messages": []}, 400, "messages"),
    ("/v1/chat/completions", {"messages": [{"content": "x"}]}, 400, "messages.0.role"),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "x"}], "top_logprobs": 2},
        400,
        "top_logprobs",
    ),
    (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "x"}],
            "tools": [{"type": "function", "function": {"name": "f"}}],
        },
        400,
        "tools",
    ),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json"}},
        400,
        "response_format.type",
    ),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "x"}], "parallel_tool_calls": False},
        400,
        "parallel_tool_calls",
    ),
    ("/detokenize", {"tokens": [1 << 40]}, 400, "tokens.0"),
]


@pytest.mark.parametrize(("path", "body", "status", "param"), BAD)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_wrong_with_a_request(server, path, body, status, param, stream):
    more = {"stream": True} if stream and path.startswith("/v1/") else {}
    data = json.dumps(body | more)  # a lone surrogate travels escaped
    headers = {"content-type": "application/json"}
    code, error = server.error(path, None, json=None, content=data, headers=headers)
    assert (code, error["param"]) == (status, param), error


def test_paths_methods_and_bodies_that_are_none(server):
    assert server.error("/v1/nothing", {})[0] == 404
    reply = server.http.get("/v1/completions")
    assert reply.status_code == 405 and reply.json()["error"]["message"]
    headers = {"content-type": "application/json"}
    code, error = server.error("/v1/completions", None, json=None, content=b"{", headers=headers)
    assert code == 400 and "JSON" in error["message"]


def test_tokens_there_and_back(server):
    got = server.post("/tokenize", {"prompt": PROMPT, "return_token_strs": True})
    assert got["count"] == len(got["tokens"]) == len(got["token_strs"])
    assert server.post("/detokenize", {"tokens": got["tokens"]}) == {"prompt": PROMPT}
    chat = server.post("/tokenize", {"messages": [{"role": "user", "content": "x"}]})
    assert chat["count"] > 3 and chat["max_model_len"] == 256
    assert server.error("/tokenize", {"prompt": "x", "messages": []})[0] == 400


def test_what_the_server_says_of_itself(server):
    server.post("/v1/completions", GREEDY | {"prompt": PROMPT})
    (model,) = server.http.get("/v1/models").json()["data"]
    assert model["id"] == "tiny" and model["max_model_len"] == 256
    assert server.http.get("/v1/models/tiny").json()["id"] == "tiny"
    assert server.http.get("/v1/models/other").status_code == 404
    assert server.http.get("/health").json() == {"status": "ok", "reason": None}
    assert server.http.get("/version").json()["version"]
    page = server.http.get("/").text
    assert page.startswith("<!doctype html>") and "http" not in page.replace("http-equiv", "")
    metrics = server.http.get("/metrics").text
    assert 'deepinfer_http_requests_total{path="/v1/completions",status="200"} 1.0' in metrics
    assert "time_to_first_token" in metrics
    (engine,) = server.http.get("/status").json()["engines"]
    assert engine["role"] == "NORMAL" and engine["generated_tokens"] >= 12


def test_the_document_describes_answers_errors_and_streams(server):
    document = server.http.get("/openapi.json").json()
    for path, methods in document["paths"].items():
        for said in methods.values():
            found = said["responses"]
            assert "422" not in found and ("default" in found or path in ("/health", "/version"))
            kinds = found["200"]["content"]
            assert path == "/metrics" or kinds["application/json"]["schema"]["$ref"]
    streamed = document["paths"]["/v1/chat/completions"]["post"]["responses"]["200"]["content"]
    assert "ChatChunk" in streamed["text/event-stream"]["schema"]["description"]
    fields = document["components"]["schemas"]["ErrorFields"]
    assert set(fields["required"]) == {"message", "type", "param", "code"}


def test_keys(llm):
    server = Server(llm, api_keys=frozenset({"right", "other"}))
    with server.http:
        body = GREEDY | {"prompt": PROMPT}
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "right"}):
            code, error = server.error("/v1/completions", body, headers=headers)
            assert (code, error["code"]) == (401, "invalid_api_key")
        server.post("/v1/completions", body, headers={"authorization": "Bearer right"})
        assert server.http.get("/health").status_code == 200
        assert server.http.get("/metrics").status_code == 401


def test_limits(llm):
    server = Server(llm, max_body=2000)
    with server.http:
        assert server.error("/v1/completions", {"prompt": "x" * 3000})[0] == 413
        chunks = iter([b"{" + b" " * 1500, b" " * 1500])
        assert server.error("/v1/completions", None, json=None, content=chunks)[0] == 413
    server = Server(llm, max_requests=3)
    with server.http:
        assert server.error("/v1/completions", {"prompt": "x", "n": 4})[0] == 400
        assert server.error("/v1/completions", {"prompt": ["x", "y"], "n": 2})[0] == 400
    server = Server(llm, max_requests=0)
    with server.http:
        reply = server.http.post("/v1/completions", json={"prompt": "x"})
        assert reply.status_code == 429 and reply.headers["retry-after"] == "1"
        assert server.http.get("/v1/models").status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_ends_its_request(server, llm, stream):
    body = {"prompt": PROMPT, "max_tokens": 240, "ignore_eos": True, "stream": stream}
    sent: list[dict[str, Any]] = []
    before = llm.stats()["generated_tokens"]

    async def call() -> None:
        first = {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}
        messages = iter([first])

        async def receive() -> dict[str, Any]:
            message = next(messages, None)
            if message is None:
                while not llm.engine.has_unfinished_requests():
                    await asyncio.sleep(0.001)
                return {"type": "http.disconnect"}
            return message

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "http_version": "1.1", "method": "POST", "scheme": "http"}
        scope |= {"path": "/v1/completions", "raw_path": b"/v1/completions", "headers": headers}
        scope |= {"query_string": b"", "root_path": "", "client": None, "server": None}
        await server.app(scope, receive, send)
        while server.app.state.context.engine.num_requests or llm.engine.has_unfinished_requests():
            await asyncio.sleep(0.001)

    server.http.portal.call(call)
    assert not any(b"[DONE]" in m.get("body", b"") for m in sent)
    assert llm.stats()["generated_tokens"] - before < 240


def test_an_engine_that_fails_is_said_to_have_failed(llm, monkeypatch):
    server = Server(llm)
    with server.http:

        def fails() -> None:
            raise OSError("the device is gone")

        monkeypatch.setattr(llm.engine, "step", fails)
        code, error = server.error("/v1/completions", {"prompt": "x"})
        assert code == 503 and "the device is gone" in error["message"]
        assert server.error("/v1/completions", {"prompt": "x", "stream": True})[0] == 503
        assert server.http.get("/health").status_code == 503
    monkeypatch.undo()
    llm.engine.abort_request(list(llm.engine.live.requests))
    while llm.engine.has_unfinished_requests():
        llm.engine.step()
