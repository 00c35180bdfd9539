"""Requests of the API as pydantic models: https://platform.openai.com/docs/api-reference, and the
further sampling fields that vLLM users know. A field that is not here is refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from deepinfer_jax.sampling_params import (
    MAX_INT32,
    MAX_PRIORITY,
    MAX_TEXT,
    RequestOutputKind,
    SamplingParams,
)

TokenId = Annotated[int, Field(ge=0, le=MAX_INT32)]
Count = Annotated[int, Field(ge=0, le=MAX_INT32)]
Text = Annotated[str, Field(max_length=MAX_TEXT)]
MAX_PROMPTS = 2048
"""Prompts of one completion request."""


class Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=False)


class StreamOptions(Model):
    include_usage: bool = False


class ResponseFormat(Model):
    type: Literal["text"]


class GenerationRequest(Model):
    """What completions and chat completions share."""

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=16384)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: Text | Annotated[list[Text], Field(max_length=1024)] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    user: Text | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # what changes no answer here, as there
    metadata: dict[str, str] | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: Literal[False] | None = None
    response_format: ResponseFormat | None = None
    # beyond the API
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Count | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=65536)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    cache_salt: Text | None = None
    return_token_ids: bool = False

    def sampling(self, max_tokens: int | None, **more: Any) -> SamplingParams:
        """The request's SamplingParams. ValueError names the field, the value and the limit."""
        names = (
            "n temperature top_p stop seed presence_penalty frequency_penalty logit_bias top_k "
            "min_p repetition_penalty min_tokens stop_token_ids include_stop_str_in_output "
            "ignore_eos skip_special_tokens spaces_between_special_tokens priority cache_salt"
        )
        values = {name: getattr(self, name) for name in names.split()}
        values = {name: value for name, value in values.items() if value is not None}
        kind = RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY
        values |= {"max_tokens": max_tokens, "output_kind": kind, "user_id": self.user or ""}
        return SamplingParams.from_dict(values | more)


class CompletionRequest(GenerationRequest):
    prompt: (
        str
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[list[list[TokenId]], Field(min_length=1, max_length=MAX_PROMPTS)]
    )
    max_tokens: Count | None = None
    logprobs: Annotated[int, Field(ge=0, le=1000)] | None = None
    echo: bool = False
    best_of: Count | None = None
    suffix: str | None = None

    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        return [self.prompt] if isinstance(self.prompt[0], int) else list(self.prompt)


class FunctionDefinition(Model):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Literal[False] | None = None


class Tool(Model):
    type: Literal["function"] = "function"
    function: FunctionDefinition


class NamedFunction(Model):
    name: str


class NamedTool(Model):
    type: Literal["function"] = "function"
    function: NamedFunction


class Message(BaseModel):
    """One message; what the template does not read is its own affair (names, tool call ids)."""

    model_config = ConfigDict(extra="allow")

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str | list[dict[str, Any]] | None = None


class ChatRequest(GenerationRequest):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=1000)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: Literal[True] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    include_reasoning: bool = True


class TokenizeRequest(Model):
    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False


class DetokenizeRequest(Model):
    model: str | None = None
    tokens: Annotated[list[TokenId], Field(max_length=1 << 20)]
