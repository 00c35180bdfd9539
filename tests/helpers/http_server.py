"""A server over a tiny model in this process, and a client of it."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import tiny_tokenizers
from engine_cases import GOLDEN
from starlette.testclient import TestClient

from deepinfer_jax import LLM
from deepinfer_jax.serve import schemas
from deepinfer_jax.serve.app import create_app
from deepinfer_jax.serve.context import ServerOptions

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PAIRS = tuple("".join(p) for p in itertools.product("abcdefghijklmnop", repeat=2))[:254]


def model_folder(path: Path) -> Path:
    """The golden Llama with a tokenizer of its 512 ids: bytes, pairs of letters, two marks."""
    shutil.copytree(GOLDEN / "llama", path)
    tiny_tokenizers.byte_level(PAIRS).save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return path


ANSWERS = {
    "/v1/completions": (schemas.CompletionAnswer, schemas.CompletionAnswer),
    "/v1/chat/completions": (schemas.ChatAnswer, schemas.ChatChunk),
    "/tokenize": (schemas.Tokens, None),
    "/detokenize": (schemas.Text, None),
}
"""What the OpenAPI document says of an answer and of a stream's event."""


class Server:
    """A client of one application over the shared engine."""

    def __init__(self, llm: LLM, **options: Any) -> None:
        self.app = create_app(llm.engine, "tiny", ServerOptions(**options))
        self.http = TestClient(self.app, raise_server_exceptions=False)

    def post(self, path: str, body: dict[str, Any], **more: Any) -> dict[str, Any]:
        reply = self.http.post(path, json=body, **more)
        assert reply.status_code == 200, reply.text
        ANSWERS[path][0].model_validate(reply.json(), strict=True)
        return reply.json()

    def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The parsed events of a stream, which must end with [DONE]."""
        reply = self.http.post(path, json=body | {"stream": True})
        assert reply.status_code == 200, reply.text
        assert reply.headers["content-type"].startswith("text/event-stream")
        lines = [x.removeprefix("data: ") for x in reply.text.split("\n\n") if x]
        assert lines[-1] == "[DONE]"
        for line in lines[:-1]:
            ANSWERS[path][1].model_validate_json(line, strict=True)
        return [json.loads(x) for x in lines[:-1]]

    def error(self, path: str, body: Any, **more: Any) -> tuple[int, dict[str, Any]]:
        reply = self.http.post(path, **({"json": body} | more))
        error = reply.json()["error"]
        schemas.ErrorAnswer.model_validate(reply.json())
        return reply.status_code, error
