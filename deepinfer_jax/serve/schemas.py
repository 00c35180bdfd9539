"""Answers of the API as pydantic models: what the OpenAPI document says of them.

Answers of generations are built as dictionaries, because a stream has one per token; tests hold
them against these models, which allow no other field.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")


# ---- errors --------------------------------------------------------------------------------------


class ErrorFields(Answer):
    """param: the request's field that is wrong; code: for programs."""

    message: Annotated[str, Field(min_length=1)]
    type: Literal[
        "invalid_request_error",
        "authentication_error",
        "not_found_error",
        "rate_limit_error",
        "service_unavailable",
        "server_error",
    ]
    param: str | None
    code: str | None


class ErrorAnswer(Answer):
    error: ErrorFields


# ---- generation ----------------------------------------------------------------------------------

FinishReason = Literal["stop", "length", "tool_calls", "insufficient_system_resource"]


class PromptDetails(Answer):
    cached_tokens: int


class Usage(Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class Head(Answer):
    id: str
    created: int
    model: str


class Choice(Answer):
    """stop_reason: the stop string or token id that ended it; finish_reason: null in all pieces of
    a stream but the last."""

    index: int
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class CompletionLogprobs(Answer):
    """Lists of one entry per token; null where it has no log-probability (a prompt's first)."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Choice):
    text: str
    logprobs: CompletionLogprobs | None
    prompt_token_ids: list[int] | None = None


class CompletionAnswer(Head):
    """usage: in a stream only in its last event, if asked for."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage | None = None


class Function(Answer):
    """arguments: JSON text."""

    name: str
    arguments: str


class Call(Answer):
    """index: in streams."""

    id: str
    type: Literal["function"]
    function: Function
    index: int | None = None


class TokenBytes(Answer):
    token: str
    logprob: float
    bytes: list[int]


class ChatToken(TokenBytes):
    top_logprobs: list[TokenBytes]


class ChatLogprobs(Answer):
    content: list[ChatToken]


class ChatMessage(Answer):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[Call] | None = None
    reasoning_content: str | None = None


class ChatChoice(Choice):
    message: ChatMessage
    logprobs: ChatLogprobs | None


class ChatAnswer(Head):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage


class ChatDelta(Answer):
    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[Call] | None = None
    reasoning_content: str | None = None


class ChatChunkChoice(Choice):
    delta: ChatDelta
    logprobs: ChatLogprobs | None


class ChatChunk(Head):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


# ---- the rest ------------------------------------------------------------------------------------


class ModelCard(Answer):
    """max_model_len: most tokens of prompt and answer together."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "deepinfer-jax"
    max_model_len: int


class ModelList(Answer):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Health(Answer):
    status: Literal["ok", "unhealthy"]
    reason: str | None


class Version(Answer):
    version: str


class Tokens(Answer):
    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str | None] | None = None


class Text(Answer):
    prompt: str


class EngineStatus(Answer):
    """An engine as the page shows it. cache: share of the KV blocks in use; state, hand_overs and
    steps: behind a router only."""

    name: str
    role: str
    state: str | None = None
    waiting: int | None = None
    prompted: int | None = None
    running: int | None = None
    cache: float | None = None
    prompt_tokens: int | None = None
    generated_tokens: int | None = None
    preemptions: int | None = None
    hand_overs: int | None = None
    steps: int | None = None


class RouterHealth(Answer):
    """problems: why it is not "ok"."""

    status: str
    problems: list[str]
    requests: int


class RouterStatus(Answer):
    """A router's own counters."""

    requests: int
    queued: int
    counters: dict[str, int]
    health: RouterHealth


class Status(Answer):
    """The server and its engines. requests: being answered; handoff: counters of hand-overs by
    engine."""

    time: float
    model: str
    requests: int
    engines: list[EngineStatus]
    handoff: dict[str, dict[str, int]] | None = None
    router: RouterStatus | None = None


# ---- descriptions of routes ----------------------------------------------------------------------


def answers(model: type[BaseModel], events: type[BaseModel] | None = None) -> dict[Any, Any]:
    """FastAPI's `responses` of a route. events: what a stream's events hold, where it has one."""
    content: dict[str, Any] = {}
    if events is not None:
        text = f"Server-sent events, each a {events.__name__}; the last is [DONE]."
        content["text/event-stream"] = {"schema": {"type": "string", "description": text}}
    return {200: {"model": model, "content": content, "description": "The answer"}} | ERRORS


ERRORS: dict[Any, Any] = {
    "default": {"model": ErrorAnswer, "description": "What is wrong, in the API's form"}
}
