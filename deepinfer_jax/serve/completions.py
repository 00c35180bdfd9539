"""/v1/completions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from deepinfer_jax.outputs import CompletionOutput, RequestOutput
from deepinfer_jax.serve import answers
from deepinfer_jax.serve.context import ServerContext
from deepinfer_jax.serve.errors import ApiError
from deepinfer_jax.serve.protocol import CompletionRequest

DEFAULT_MAX_TOKENS = 16


class Completions:
    """One request: its prompts' outputs as the API's choices."""

    def __init__(self, context: ServerContext, request: CompletionRequest) -> None:
        if request.suffix is not None:
            raise ApiError("suffix is not supported: no model here fills in", param="suffix")
        n = request.n or 1
        if request.best_of not in (None, n):
            raise ApiError(f"best_of must be n={n}, got {request.best_of}", param="best_of")
        if request.echo and request.stream and request.logprobs is not None:
            raise ApiError("echo with logprobs does not stream", param="stream")
        context.check_room(len(request.prompts()), n)
        self.context, self.request, self.n = context, request, n
        most = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
        self.params = request.sampling(
            most,
            logprobs=request.logprobs,
            prompt_logprobs=request.logprobs if request.echo else None,
        )
        self.head = answers.head("text_completion", context.name, "cmpl")
        self.last: dict[int, RequestOutput] = {}
        self.tokens = 0
        self.offsets: dict[int, int] = {}  # characters of a choice's text before its next token

    async def outputs(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        engine = self.context.engine
        streams = [engine.generate(p, self.params, "cmpl") for p in self.request.prompts()]
        async for i, output in answers.merged(streams):
            answers.check_ended(output, self.context.max_model_len)
            self.last[i] = output
            self.tokens += sum(len(c.token_ids) for c in output.outputs)
            yield i, output

    async def whole(self) -> dict[str, Any]:
        async for _ in self.outputs():
            pass
        choices = [
            self.choice(i * self.n + c.index, c, self.last[i], c.finish_reason, first=True)
            for i in sorted(self.last)
            for c in self.last[i].outputs
        ]
        return self.head | {"choices": choices, "usage": self.usage()}

    def usage(self) -> dict[str, Any]:
        # the engine has generated one token where none was asked for
        tokens = 0 if self.request.max_tokens == 0 else self.tokens
        return answers.usage(list(self.last.values()), tokens)

    async def events(self) -> AsyncIterator[bytes]:
        seen: set[int] = set()
        async for i, output in self.outputs():
            for c in output.outputs:
                index = i * self.n + c.index
                if not c.token_ids and not c.text and c.finish_reason is None:
                    continue
                first = index not in seen
                seen.add(index)
                choice = self.choice(index, c, output, c.finish_reason, first=first)
                yield answers.event(self.head | {"choices": [choice]})
        options = self.request.stream_options
        if options is not None and options.include_usage:
            yield answers.event(self.head | {"choices": [], "usage": self.usage()})
        yield answers.DONE

    def choice(
        self,
        index: int,
        c: CompletionOutput,
        output: RequestOutput,
        reason: str | None,
        *,
        first: bool,
    ) -> dict[str, Any]:
        echo = self.request.echo and first
        nothing = self.request.max_tokens == 0
        text = "" if nothing else c.text
        tokens = [] if nothing else c.token_ids
        entries = [] if nothing else c.logprobs
        prompt = self.prompt_text(output) if echo else ""
        logprobs = None
        if self.request.logprobs is not None:
            ids, all_entries = list(tokens), list(entries or [])
            if echo:
                ids = output.prompt_token_ids + ids
                all_entries = list(output.prompt_logprobs or []) + all_entries
            at = self.offsets.get(index, 0)
            logprobs = answers.completion_logprobs(
                ids, all_entries, self.request.logprobs, at, self.token_text
            )
            self.offsets[index] = at + sum(map(len, logprobs["tokens"]))
        found = {"index": index, "text": prompt + text, "logprobs": logprobs}
        found |= {"finish_reason": "length" if nothing else reason, "stop_reason": c.stop_reason}
        if self.request.return_token_ids:
            found |= {"token_ids": tokens, "prompt_token_ids": output.prompt_token_ids}
        return found

    def token_text(self, token: int) -> str:
        tokenizer = self.context.tokenizer
        return f"token_id:{token}" if tokenizer is None else tokenizer.decode([token])

    def prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is not None:
            return output.prompt
        tokenizer = self.context.tokenizer
        return "" if tokenizer is None else tokenizer.decode(output.prompt_token_ids)
