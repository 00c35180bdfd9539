"""Finding stop strings in text that arrives in pieces, without ever releasing part of one."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any


class StopMatcher:
    """Looks for stop strings across piece boundaries with one Knuth-Morris-Pratt automaton per
    string.

    `feed` returns the text that no stop string can touch any more: the longest end of the text that
    begins some stop string is held back. Time is linear in the text's length whatever the pieces
    are. The string that is complete first wins; of those complete at the same character, the one
    listed first.
    """

    def __init__(self, stop: Sequence[str], *, include_stop: bool = False) -> None:
        self.stop = tuple(stop)
        self.include_stop = include_stop
        self.matched: str | None = None
        self._failure = [_failure_table(s) for s in self.stop]
        self._progress = [0] * len(
            self.stop
        )  # how many characters of each stop string the text ends with
        self._starts = re.compile("|".join(re.escape(s[0]) for s in self.stop))
        self._held = ""

    def feed(self, text: str, *, may_stop: bool = True) -> str:
        """Text released by adding `text`; may_stop=False passes complete stop strings through
        (before min_tokens).

        After a match (`matched`) everything further is dropped.
        """
        if self.matched is not None:
            return ""
        if not self.stop:
            return text
        end = len(self._held)
        text = self._held + text
        while end < len(text):
            if not any(self._progress) and (end := self._next_start(text, end)) == len(text):
                break
            end += 1
            complete = self._advance(text[end - 1])
            if complete is not None and may_stop:
                self.matched = complete
                self._held = ""
                return text[: end if self.include_stop else end - len(complete)]
        keep = len(text) - max(self._progress)
        self._held = text[keep:]
        return text[:keep]

    def flush(self) -> str:
        """Releases what is held back: the text has ended without the rest of a stop string."""
        held, self._held = self._held, ""
        self._progress = [0] * len(self.stop)
        return held

    def state_dict(self) -> dict[str, Any]:
        return {"held": self._held, "progress": list(self._progress), "matched": self.matched}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._held, self._progress, self.matched = (
            state["held"],
            list(state["progress"]),
            state["matched"],
        )

    def _next_start(self, text: str, position: int) -> int:
        """Index of the next character that begins a stop string, or len(text): most text holds
        none, and is skipped at once."""
        found = self._starts.search(text, position)
        return found.start() if found else len(text)

    def _advance(self, char: str) -> str | None:
        """Moves every automaton by one character; returns the first listed stop string that is
        complete now."""
        complete = None
        for i, (pattern, failure) in enumerate(zip(self.stop, self._failure, strict=True)):
            n = self._progress[i]
            while n and pattern[n] != char:
                n = failure[n - 1]
            if pattern[n] == char:
                n += 1
            if n == len(pattern):
                complete = complete or pattern
                n = failure[n - 1]
            self._progress[i] = n
        return complete


def _failure_table(pattern: str) -> list[int]:
    """Entry i: length of the longest proper prefix of pattern that ends pattern[:i + 1] (Knuth,
    Morris, Pratt 1977)."""
    table = [0] * len(pattern)
    n = 0
    for i in range(1, len(pattern)):
        while n and pattern[i] != pattern[n]:
            n = table[n - 1]
        if pattern[i] == pattern[n]:
            n += 1
        table[i] = n
    return table
