"""The program that renders chat templates in a process of its own, which template_renderer.py runs.

A template comes with a checkpoint: it is a stranger's program, and Jinja's sandbox bounds neither
its time nor its memory. So it runs here, under limits, and what goes wrong here stays here. This
file is run by its path and imports nothing of ours.

Requests and replies are JSON objects behind their length (u64, little endian).
Request: source, messages, variables, keywords (names of variables that the template must read).
Reply: text and unread (names of given variables it does not read), or error.
"""

from __future__ import annotations

import datetime
import functools
import json
import os
import resource
import signal
import struct
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

CPU_SECONDS = 2.0
"""Of one rendering; what does not look at signals meanwhile is ended by the parent's clock."""
MAX_TEXT = 1 << 26
"""Characters that a template may produce."""
MEMORY_BYTES = 1 << 30
"""Address space of the process."""
LENGTH = struct.Struct("<Q")


class TimeLimit(Exception):
    """The rendering took more than CPU_SECONDS."""


class JsonText(dict):
    """Arguments of a tool call that came as JSON text: an object to templates that read it as one,
    the text itself where a template prints it or adds it to a string."""

    def __init__(self, text: str) -> None:
        super().__init__(json.loads(text))
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: str) -> str:
        return self._text + other

    def __radd__(self, other: str) -> str:
        return other + self._text


class GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks assistant text for training masks; here it is
    just its body, in a scope of its own."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it as a plain class attribute)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


@dataclass(frozen=True)
class Compiled:
    """variables: names the template reads that it does not set. takes_parts: whether it goes
    through the parts of a message's content."""

    template: jinja2.Template
    variables: frozenset[str]
    takes_parts: bool


@functools.lru_cache(maxsize=32)
def compiled(source: str) -> Compiled:
    env = environment()
    tree = env.parse(source)
    names = frozenset(jinja2.meta.find_undeclared_variables(tree))
    return Compiled(env.from_string(source), names, takes_parts(tree))


def environment() -> jinja2.Environment:
    """Jinja as Hugging Face templates expect it: the extensions, filters and functions of
    transformers."""
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, GenerationBlock]
    )
    env.filters["tojson"] = to_json
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = strftime_now
    del env.globals["lipsum"]
    return env


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes for HTML, which would corrupt tool descriptions."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def strftime_now(fmt: str) -> str:
    return datetime.datetime.now().strftime(fmt)


def takes_parts(tree: jinja2.nodes.Template) -> bool:
    """Whether the template loops over a message's content, or takes a part of it by number."""
    names = set(macro_names(tree))
    for assign in tree.find_all(jinja2.nodes.Assign):
        if isinstance(assign.target, jinja2.nodes.Name) and reads_content(assign.node):
            names.add(assign.target.name)
    loops = (loop.iter for loop in tree.find_all(jinja2.nodes.For))
    items = (
        item.node
        for item in tree.find_all(jinja2.nodes.Getitem)
        if isinstance(item.arg, jinja2.nodes.Const) and isinstance(item.arg.value, int)
    )
    return any(is_content(node, names) for nodes in (loops, items) for node in nodes)


def macro_names(tree: jinja2.nodes.Template) -> Iterator[str]:
    """Parameters of macros that are called with a content."""
    macros = {macro.name: macro.args for macro in tree.find_all(jinja2.nodes.Macro)}
    for call in tree.find_all(jinja2.nodes.Call):
        parameters = macros.get(getattr(call.node, "name", ""), [])
        given = zip(parameters, call.args, strict=False)
        yield from (parameter.name for parameter, value in given if reads_content(value))
        yield from (pair.key for pair in call.kwargs if parameters and reads_content(pair.value))


def is_content(node: jinja2.nodes.Node, names: set[str]) -> bool:
    if isinstance(node, jinja2.nodes.Filter):  # content | list
        return node.node is not None and is_content(node.node, names)
    if isinstance(node, jinja2.nodes.Name):
        return node.name in names
    return key_of(node) == "content"


def reads_content(node: jinja2.nodes.Node) -> bool:
    """Whether an expression is a content, or chooses between such (`m.content or []`)."""
    if isinstance(node, jinja2.nodes.CondExpr):
        return any(n is not None and reads_content(n) for n in (node.expr1, node.expr2))
    if isinstance(node, jinja2.nodes.Or):
        return reads_content(node.left) or reads_content(node.right)
    return key_of(node) == "content"


def key_of(node: jinja2.nodes.Node) -> str | None:
    """The key of x.key and x["key"]."""
    if isinstance(node, jinja2.nodes.Getattr):
        return node.attr
    if isinstance(node, jinja2.nodes.Getitem) and isinstance(node.arg, jinja2.nodes.Const):
        return node.arg.value if isinstance(node.arg.value, str) else None
    return None


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """The reply to a request; every failure is an {"error"}."""
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, CPU_SECONDS)
        try:
            return render(request)
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    except TimeLimit:
        return {"error": f"it takes longer than {CPU_SECONDS:g} s"}
    except RecursionError:
        return {"error": "it nests too deeply"}
    except MemoryError:
        return {"error": f"it needs more than {MEMORY_BYTES >> 20} MiB"}
    except jinja2.TemplateSyntaxError as error:
        return {"error": f"line {error.lineno}: {error.message}"}
    except Exception as error:  # whatever a template may provoke is the template's failure
        return {"error": str(error) or type(error).__name__}


def render(request: Mapping[str, Any]) -> dict[str, Any]:
    program = compiled(request["source"])
    if unread := [k for k in request["keywords"] if k not in program.variables]:
        known = sorted(program.variables - {"messages"})
        raise ValueError(f"it does not read the keyword(s) {unread}; it reads {known}")
    messages = [template_message(message, program.takes_parts) for message in request["messages"]]
    parts, size = [], 0
    for part in program.template.generate(messages=messages, **request["variables"]):
        size += len(part)
        if size > MAX_TEXT:
            raise ValueError(f"it produces more than {MAX_TEXT} characters")
        parts.append(part)
    given = (k for k, v in request["variables"].items() if v is not None)
    return {"text": "".join(parts), "unread": [k for k in given if k not in program.variables]}


def template_message(message: dict[str, Any], parts: bool) -> dict[str, Any]:
    """A message as the template reads it: text parts joined by newlines unless it takes them one by
    one, arguments of tool calls as objects."""
    content = message.get("content")
    if isinstance(content, list) and not parts:
        message["content"] = "\n".join(part["text"] for part in content)
    calls = [c.get("function") for c in message.get("tool_calls") or () if isinstance(c, dict)]
    for call in [*calls, message.get("function_call")]:
        if isinstance(call, dict) and isinstance(call.get("arguments"), str):
            call["arguments"] = JsonText(call["arguments"] or "{}")
    return message


def receive(stream: BinaryIO) -> Any:
    """The next request; None at the end of the stream."""
    head = stream.read(LENGTH.size)
    return json.loads(stream.read(*LENGTH.unpack(head))) if len(head) == LENGTH.size else None


def send(stream: BinaryIO, value: Any) -> None:
    body = json.dumps(value).encode()
    stream.write(LENGTH.pack(len(body)) + body)
    stream.flush()


def out_of_time(*_: object) -> None:
    raise TimeLimit


def main() -> None:
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # nothing else may write into the replies
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(hard, MEMORY_BYTES)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    signal.signal(signal.SIGVTALRM, out_of_time)
    send(replies, {"ready": True})
    while (request := receive(sys.stdin.buffer)) is not None:
        send(replies, answer(request))


if __name__ == "__main__":
    main()
