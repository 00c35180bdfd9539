"""Conversations, templates and tools that are rendered here and, for the expected texts in
tests/golden/chat.json, by transformers (tests/golden/make_chat.py)."""

from __future__ import annotations

import enum
from typing import Any, Literal

CHATML = (
    "{%- if tools %}{{ '<|im_start|>system\\n' }}{%- for tool in tools %}{{ tool | tojson }}"
    "{{ '\\n' }}{%- endfor %}{{ '<|im_end|>\\n' }}{%- endif %}"
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{%- if m.reasoning_content %}{{ '<think>' + m.reasoning_content + '</think>' }}{%- endif %}"
    "{%- if m.content is defined %}{{ m.content }}{%- endif %}"
    "{%- for c in m.tool_calls or [] %}{{ '\\n<tool_call>' }}{{ c.function.name }} "
    "{{ c.function.arguments | tojson }}{{ '</tool_call>' }}{%- endfor %}"
    "{{ '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
)
PARTS = (
    "{% macro body(content) %}{% if content is string %}{{ content }}{% else %}"
    "{% for part in content %}[{{ part.text }}]{% endfor %}{% endif %}{% endmacro %}"
    "{% for m in messages %}{{ bos_token }}{{ m.role }}: {{ body(m.content) }}{{ eos_token }}"
    "{% endfor %}"
)
TRIMMED = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</{{ m.role }}>{% endfor %}"
THOUGHT = "{% for m in messages %}{{ m.thinking }}|{{ m.content }};{% endfor %}"


class Unit(enum.Enum):
    CELSIUS = "celsius"
    FAHRENHEIT = "fahrenheit"


def weather(city: str, unit: Unit = Unit.CELSIUS, days: int | None = None) -> dict[str, float]:
    """
    The weather of a city.

    It asks the nearest station.

    Args:
        city: The city's name,
            as its people write it
        unit (Unit): The unit of temperatures
        days: Days ahead

    Returns:
        Temperatures by hour.
    """


def drink(kind: Literal["hot", "cold", 3], size: int | str, extras: list[str] | None = None):
    """Makes a drink.

    Args:
        kind: What kind
        size: How much (choices: ["small", "large"])
        extras: What goes in: sugar, milk
    """


def table(rows: list[tuple[int, str]], any_value: Any, lookup: dict[str, list[float]]) -> None:
    """Builds a table

    Args:
        rows: Rows of it
        any_value: Anything
        lookup: Numbers by name
    Raises:
        ValueError: never
    """


FUNCTIONS = (weather, drink, table)
USER = {"role": "user", "content": "Weather in Oslo?"}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Å"}}}
RENDERINGS: dict[str, dict[str, Any]] = {
    "tools": {"template": CHATML, "messages": [USER], "tools": [weather, {"name": "x", "é": 1}]},
    "no tools": {"template": CHATML, "messages": [USER], "tools": []},
    "tool call": {
        "template": CHATML,
        "messages": [
            USER,
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": "12", "tool_call_id": "c1"},
        ],
        "add_generation_prompt": True,
    },
    "reasoning by its older names": {
        "template": CHATML,
        "messages": [USER, {"role": "assistant", "content": "12", "reasoning": "hm"}],
    },
    "reasoning of gpt-oss": {
        "template": THOUGHT,
        "messages": [{"role": "assistant", "content": "12", "reasoning_content": "hm"}],
    },
    "parts": {
        "template": PARTS,
        "messages": [
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            },
            {"role": "assistant", "content": "c"},
        ],
        "bos_token": "<s>",
        "eos_token": "</s>",
    },
    "continued": {
        "template": CHATML,
        "messages": [USER, {"role": "assistant", "content": "In Oslo it is "}],
        "continue_final_message": True,
    },
    "continued, trimmed": {
        "template": TRIMMED,
        "messages": [USER, {"role": "assistant", "content": "In Oslo it is "}],
        "continue_final_message": True,
    },
    "continued part": {
        "template": PARTS,
        "messages": [
            USER,
            {
                "role": "assistant",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            },
        ],
        "continue_final_message": True,
        "bos_token": "",
        "eos_token": "!",
    },
    "continued reasoning": {
        "template": CHATML,
        "messages": [USER, {"role": "assistant", "thinking": "hm, it", "content": ""}],
        "continue_final_message": "thinking",
    },
}
