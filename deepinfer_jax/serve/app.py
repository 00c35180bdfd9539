"""The HTTP application: routes, limits, errors in the API's form."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable
from importlib import resources
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.responses import StreamingResponse as Streaming

from deepinfer_jax import __version__
from deepinfer_jax.serve import schemas
from deepinfer_jax.serve.answers import event
from deepinfer_jax.serve.async_engine import AsyncEngine
from deepinfer_jax.serve.chat import ChatCompletions
from deepinfer_jax.serve.completions import Completions
from deepinfer_jax.serve.context import ServerContext, ServerOptions
from deepinfer_jax.serve.errors import ApiError
from deepinfer_jax.serve.limits import Limits
from deepinfer_jax.serve.metrics import ServerMetrics, status_of
from deepinfer_jax.serve.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)


def create_app(engine: Any, name: str, options: ServerOptions | None = None) -> FastAPI:
    """The application over what `LLM` built (`llm.engine`). name: the model's in answers."""
    options = options or ServerOptions()

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        served.start()
        app.state.started = int(time.time())
        yield
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(served.drained(), options.drain_seconds)
        await served.stop()

    served = AsyncEngine(engine)
    context = ServerContext(served, name, options)
    metrics = ServerMetrics(engine)
    app = FastAPI(
        title="DeepInfer-JAX", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None
    )
    app.state.context, app.state.metrics = context, metrics
    _add_errors(app)
    _add_generation(app, context)
    _add_rest(app, context, metrics)
    app.add_middleware(Limits, context=context, metrics=metrics)
    if options.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(options.allowed_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type"],
        )
    return app


# ---- errors --------------------------------------------------------------------------------------


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(ValueError)
    async def value_error(request: Request, error: ValueError) -> Response:
        return ApiError(str(error)).response()

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        place = [str(p) for p in first["loc"] if p != "body"]
        field = ".".join(place) or None
        if first["type"] == "extra_forbidden":
            message = f"unrecognized request argument: {field}"
        elif first["type"] == "json_invalid":
            message, field = f"the body is not JSON: {first['ctx']['error']}", None
        else:
            message = f"{field or 'the body'}: {first['msg']}"
        return ApiError(message, param=field).response()

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        return ApiError(str(error.detail), status=error.status_code).response()


# ---- generation ----------------------------------------------------------------------------------


def _add_generation(app: FastAPI, context: ServerContext) -> None:
    @app.post(
        "/v1/completions",
        responses=schemas.answers(schemas.CompletionAnswer, schemas.CompletionAnswer),
    )
    async def completions(body: CompletionRequest, request: Request) -> Response:
        _check_model(context, body.model)
        return await _answer(Completions(context, body), bool(body.stream), request)

    @app.post(
        "/v1/chat/completions", responses=schemas.answers(schemas.ChatAnswer, schemas.ChatChunk)
    )
    async def chat(body: ChatRequest, request: Request) -> Response:
        _check_model(context, body.model)
        job = await asyncio.to_thread(ChatCompletions, context, body)  # rendering takes a while
        return await _answer(job, bool(body.stream), request)


async def _answer(job: Any, stream: bool, request: Request) -> Response:
    if not stream:
        return JSONResponse(await _unless_gone(job.whole(), request))
    events = job.events()
    try:  # what is wrong with the request shows here, as an HTTP status
        first = await _unless_gone(anext(events), request)
    except BaseException:
        await events.aclose()
        raise
    return Streaming(_events(first, events), media_type="text/event-stream")


async def _events(first: bytes, events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    async with contextlib.aclosing(events):  # type: ignore[type-var]
        yield first
        try:
            async for data in events:
                yield data
        except ApiError as error:  # the status line has gone out already
            yield event(error.body())
        except ValueError as error:  # another of its prompts is refused
            yield event(ApiError(str(error)).body())


async def _unless_gone(answer: Awaitable[Any], request: Request) -> Any:
    """The answer; its work is cancelled when the client hangs up."""
    task = asyncio.ensure_future(answer)
    gone = asyncio.ensure_future(_hung_up(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError("the client has gone", status=499)
        return task.result()
    finally:
        for other in (task, gone):
            other.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _hung_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _check_model(context: ServerContext, model: str | None) -> None:
    if model is not None and model != context.name:
        raise ApiError(
            f"the model {model!r} does not exist; this server has {context.name!r}",
            status=404,
            param="model",
            code="model_not_found",
        )


# ---- the rest ------------------------------------------------------------------------------------


def _add_rest(app: FastAPI, context: ServerContext, metrics: ServerMetrics) -> None:
    page = resources.files("deepinfer_jax.serve").joinpath("page.html").read_text()

    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        return HTMLResponse(page)

    @app.get("/v1/models", responses=schemas.ERRORS)
    async def models() -> schemas.ModelList:
        return schemas.ModelList(data=[_model(app, context)])

    @app.get("/v1/models/{model:path}", responses=schemas.ERRORS)
    async def model(model: str) -> schemas.ModelCard:
        _check_model(context, model)
        return _model(app, context)

    @app.get("/health", responses={503: {"model": schemas.Health}})
    async def health(response: Response) -> schemas.Health:
        failure = context.engine.failure
        response.status_code = 200 if failure is None else 503
        return schemas.Health(status="ok" if failure is None else "unhealthy", reason=failure)

    @app.get("/version")
    async def version() -> schemas.Version:
        return schemas.Version(version=__version__)

    @app.get("/metrics", response_class=PlainTextResponse, responses=schemas.ERRORS)
    async def prometheus() -> Response:
        text = await asyncio.to_thread(metrics.text)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    @app.get("/status", response_model_exclude_none=True, responses=schemas.ERRORS)
    async def status() -> schemas.Status:
        found = await asyncio.to_thread(status_of, context.raw)
        return schemas.Status(**found, model=context.name, requests=context.engine.num_requests)

    @app.post("/tokenize", response_model_exclude_none=True, responses=schemas.ERRORS)
    async def tokenize(body: TokenizeRequest) -> schemas.Tokens:
        return await asyncio.to_thread(_tokenize, context, body)

    @app.post("/detokenize", responses=schemas.ERRORS)
    async def detokenize(body: DetokenizeRequest) -> schemas.Text:
        _check_model(context, body.model)
        tokenizer = _tokenizer(context)
        return schemas.Text(prompt=tokenizer.decode(body.tokens, skip_special_tokens=False))


def _model(app: FastAPI, context: ServerContext) -> schemas.ModelCard:
    return schemas.ModelCard(
        id=context.name, created=app.state.started, max_model_len=context.max_model_len
    )


def _tokenizer(context: ServerContext) -> Any:
    if context.tokenizer is None:
        raise ApiError("this model has no tokenizer: use token ids")
    return context.tokenizer


def _tokenize(context: ServerContext, body: TokenizeRequest) -> schemas.Tokens:
    _check_model(context, body.model)
    tokenizer = _tokenizer(context)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError("give either prompt or messages", param="prompt")
    if body.messages is not None:
        messages = [m.model_dump(exclude_unset=True) for m in body.messages]
        ids = tokenizer.apply_chat_template(
            messages, add_generation_prompt=body.add_generation_prompt
        )
    else:
        ids = tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens)
    names = [tokenizer.id_to_token(i) for i in ids] if body.return_token_strs else None
    return schemas.Tokens(
        tokens=ids, count=len(ids), max_model_len=context.max_model_len, token_strs=names
    )
