"""What every handler knows of the server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from deepinfer_jax.serve.async_engine import AsyncEngine
from deepinfer_jax.serve.errors import ApiError, busy
from deepinfer_jax.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class ServerOptions:
    """What an operator sets. max_body: bytes of a request; max_requests: unfinished completions,
    above which a client is told to come again; api_keys: empty means that everybody may ask;
    allowed_origins: of pages elsewhere that may ask (CORS); tool_parser: "auto" goes by the chat
    template; reasoning_parser: "auto", "think" or "none"."""

    max_body: int = 8 << 20
    max_requests: int = 4096
    api_keys: frozenset[str] = frozenset()
    allowed_origins: tuple[str, ...] = ()
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"
    drain_seconds: float = 30.0


@dataclass(frozen=True)
class ServerContext:
    """engine: where requests go; name: the model's in answers."""

    engine: AsyncEngine
    name: str
    options: ServerOptions

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.engine.engine.tokenizer

    @property
    def template_text(self) -> str:
        """The chat templates' own text, from which the form of tool calls is told."""
        templates = {} if self.tokenizer is None else self.tokenizer.chat_templates
        return "\n".join(t.source for t in templates.values())

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and answer together."""
        return self.engine.engine.admission.limits.max_model_len

    def check_room(self, prompts: int, n: int) -> None:
        """ApiError if one request asks for more completions than the server has at a time (400), or
        if with it there would be more unfinished ones than that (429)."""
        most = self.options.max_requests
        if prompts * n > most:
            raise ApiError(f"{prompts} prompts with n={n}: at most {most} completions", param="n")
        if self.engine.num_completions + prompts * n > most:
            raise busy(most)

    @property
    def raw(self) -> Any:
        """The engine behind the asynchronous one."""
        return self.engine.engine
