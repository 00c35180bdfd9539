"""/v1/chat/completions."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from deepinfer_jax.outputs import CompletionOutput, RequestOutput
from deepinfer_jax.serve import answers
from deepinfer_jax.serve.context import ServerContext
from deepinfer_jax.serve.errors import ApiError
from deepinfer_jax.serve.protocol import ChatRequest
from deepinfer_jax.serve.tool_parsers import (
    FAMILIES,
    ReasoningParser,
    ToolCall,
    ToolParser,
    family_of,
)


@dataclass
class Delta:
    """What a piece of text adds to an answer."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)


class Answer:
    """One choice's text on its way into content, reasoning and tool calls."""

    def __init__(self, tools: ToolParser | None, reasoning: ReasoningParser | None) -> None:
        self._tools, self._reasoning = tools, reasoning
        self.num_calls = 0
        self.begun = False

    def feed(self, text: str, ended: bool) -> Delta:
        delta = Delta(content=text)
        if self._reasoning is not None:
            delta.reasoning, delta.content = self._reasoning.feed(text)
            if ended:
                more, content = self._reasoning.finish()
                delta.reasoning += more
                delta.content += content
        if self._tools is not None:
            parts = [self._tools.feed(delta.content)]
            if ended:
                parts.append(self._tools.finish())
            delta.content = "".join(p.content for p in parts)
            delta.calls = [call for p in parts for call in p.calls]
        return delta


class ChatCompletions:
    """One request: a conversation's answer, whole or as events."""

    def __init__(self, context: ServerContext, request: ChatRequest) -> None:
        if context.tokenizer is None or not context.tokenizer.has_chat_template:
            raise ApiError("this model has no chat template: use /v1/completions", param="messages")
        context.check_room(1, request.n or 1)
        self.context, self.request = context, request
        self.family = self._tool_family()
        self.prompt = self._render()
        self.params = self._params()
        self.head = answers.head(
            "chat.completion.chunk" if request.stream else "chat.completion", context.name, "chat"
        )
        self.last: RequestOutput | None = None
        self.tokens = 0
        self.answers: dict[int, Answer] = {}

    # ---- the request -----------------------------------------------------------------------------

    def _tool_family(self) -> str | None:
        r = self.request
        if r.tool_choice not in (None, "none", "auto"):
            what = r.tool_choice if isinstance(r.tool_choice, str) else "a named function"
            raise ApiError(
                f"tool_choice {what!r} is not available yet: auto and none are", param="tool_choice"
            )
        if not r.tools or r.tool_choice == "none":
            return None
        chosen = self.context.options.tool_parser
        if chosen == "auto":
            chosen = family_of(self.context.template_text)
        if chosen is None:
            raise ApiError(
                "the chat template shows no known form of tool calls: start the server with"
                f" --tool-parser {'|'.join(FAMILIES)}",
                param="tools",
            )
        return chosen

    def _render(self) -> list[int]:
        r = self.request
        messages = [m.model_dump(exclude_unset=True) for m in r.messages]
        tools = [t.model_dump(exclude_none=True) for t in r.tools or ()]
        given = {"tools": tools} if tools and r.tool_choice != "none" else {}
        if r.continue_final_message:
            given["continue_final_message"] = True
        add = r.add_generation_prompt and not r.continue_final_message
        return self.context.tokenizer.apply_chat_template(
            messages, add_generation_prompt=add, **given, **(r.chat_template_kwargs or {})
        )

    def _params(self) -> Any:
        r = self.request
        if r.top_logprobs and not r.logprobs:
            raise ApiError("top_logprobs needs logprobs=true", param="top_logprobs")
        if r.max_tokens is not None and r.max_completion_tokens not in (None, r.max_tokens):
            raise ApiError(
                f"max_tokens={r.max_tokens} and max_completion_tokens={r.max_completion_tokens}"
                " differ",
                param="max_completion_tokens",
            )
        most = r.max_tokens if r.max_completion_tokens is None else r.max_completion_tokens
        more: dict[str, Any] = {}
        if r.logprobs:
            more["logprobs"] = r.top_logprobs or 0
        if self.family is not None and FAMILIES[self.family].special:
            more["skip_special_tokens"] = False
        return r.sampling(most, **more)

    def _answer(self, index: int) -> Answer:
        if index not in self.answers:
            tools = None if self.family is None else ToolParser(FAMILIES[self.family])
            self.answers[index] = Answer(tools, self._reasoning())
        return self.answers[index]

    def _reasoning(self) -> ReasoningParser | None:
        chosen = self.context.options.reasoning_parser
        template = self.context.template_text
        if chosen == "none" or (chosen == "auto" and "<think>" not in template):
            return None
        tail = self.context.tokenizer.decode(self.prompt[-8:], skip_special_tokens=False)
        return ReasoningParser(begun=tail.rstrip().endswith("<think>"))

    # ---- the answer ------------------------------------------------------------------------------

    async def outputs(self) -> AsyncIterator[RequestOutput]:
        engine = self.context.engine
        stream = engine.generate({"prompt_token_ids": self.prompt}, self.params, "chat")
        async for _, output in answers.merged([stream]):
            answers.check_ended(output, self.context.max_model_len)
            self.last = output
            self.tokens += sum(len(c.token_ids) for c in output.outputs)
            yield output

    async def whole(self) -> dict[str, Any]:
        async for _ in self.outputs():
            pass
        assert self.last is not None
        choices = [self._choice(c) for c in self.last.outputs]
        return self.head | {"choices": choices, "usage": answers.usage([self.last], self.tokens)}

    def _choice(self, c: CompletionOutput) -> dict[str, Any]:
        delta = self._answer(c.index).feed(c.text, ended=True)
        message: dict[str, Any] = {"role": "assistant", "content": delta.content or None}
        message["refusal"] = None
        if not delta.calls:
            message["content"] = delta.content
        else:
            message["tool_calls"] = [self._call(x) for x in delta.calls]
        if delta.reasoning and self.request.include_reasoning:
            message["reasoning_content"] = delta.reasoning
        reason = "tool_calls" if delta.calls and c.finish_reason == "stop" else c.finish_reason
        logprobs = answers.chat_logprobs(c, self.request.top_logprobs or 0)
        found = {"index": c.index, "message": message, "logprobs": logprobs}
        found |= {"finish_reason": reason, "stop_reason": c.stop_reason}
        return found | ({"token_ids": c.token_ids} if self.request.return_token_ids else {})

    async def events(self) -> AsyncIterator[bytes]:
        async for output in self.outputs():
            for c in output.outputs:
                for choice in self._delta_choices(c):
                    yield answers.event(self.head | {"choices": [choice]})
        options = self.request.stream_options
        if options is not None and options.include_usage and self.last is not None:
            usage = answers.usage([self.last], self.tokens)
            yield answers.event(self.head | {"choices": [], "usage": usage})
        yield answers.DONE

    def _delta_choices(self, c: CompletionOutput) -> list[dict[str, Any]]:
        answer = self._answer(c.index)
        ended = c.finish_reason is not None
        delta = answer.feed(c.text, ended)
        fields: dict[str, Any] = {}
        if not answer.begun:
            fields["role"], answer.begun = "assistant", True
            fields.setdefault("content", "")
        if delta.content:
            fields["content"] = delta.content
        if delta.reasoning and self.request.include_reasoning:
            fields["reasoning_content"] = delta.reasoning
        if delta.calls:
            first = answer.num_calls
            fields["tool_calls"] = [
                {"index": i} | self._call(call) for i, call in enumerate(delta.calls, first)
            ]
            answer.num_calls += len(delta.calls)
        logprobs = answers.chat_logprobs(c, self.request.top_logprobs or 0)
        if not fields and not ended and logprobs is None:
            return []
        called = answer.num_calls and c.finish_reason == "stop"
        choice = {"index": c.index, "delta": fields, "logprobs": logprobs}
        choice["finish_reason"] = "tool_calls" if called else c.finish_reason
        if ended:
            choice["stop_reason"] = c.stop_reason
        if self.request.return_token_ids:
            choice["token_ids"] = c.token_ids
        return [choice]

    @staticmethod
    def _call(call: ToolCall) -> dict[str, Any]:
        function = {"name": call.name, "arguments": call.arguments}
        return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}
