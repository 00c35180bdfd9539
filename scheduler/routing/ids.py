"""Names of what travels in a disaggregated deployment, written and read in this one place.

    PartId      one completion of a request             "name.part"
    AttemptId   one try to prefill and decode it        "name.part@attempt"
    HandoffId   one try to hand an attempt over         "name.part@attempt/number"

The numbers stand at the right end, so that any text may be a request's name. An attempt or a
hand-over that is repeated has another number: nothing can find what an older one left behind.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_PATTERN = re.compile(r"(?s)(.*)\.(\d{1,18})@(\d{1,18})(?:/(\d{1,18}))?")


class PartId(NamedTuple):
    """request: the request's name, unique in the deployment. part: index of the completion."""

    request: str
    part: int = 0

    def attempt(self, number: int) -> AttemptId:
        return AttemptId(self.request, self.part, number)

    def __str__(self) -> str:
        return f"{self.request}.{self.part}"


class AttemptId(NamedTuple):
    """attempt: counts from 1; 0 is a part that no engine has had."""

    request: str
    part: int
    attempt: int

    @property
    def part_id(self) -> PartId:
        return PartId(self.request, self.part)

    def handoff(self, number: int) -> HandoffId:
        return HandoffId(self, number)

    @classmethod
    def parse(cls, text: str) -> AttemptId:
        """ "a.0@2" -> ("a", 0, 2). Raises ValueError for anything else."""
        found = parse_id(text)
        if not isinstance(found, AttemptId):
            raise ValueError(f"{text!r} names a hand-over, not an attempt")
        return found

    def __str__(self) -> str:
        return f"{self.request}.{self.part}@{self.attempt}"


class HandoffId(NamedTuple):
    """number: counts from 1; 0 is an attempt restored from a snapshot, which nobody handed over."""

    attempt: AttemptId
    number: int

    @classmethod
    def parse(cls, text: str) -> HandoffId:
        """ "a.0@2/1" -> (("a", 0, 2), 1). Raises ValueError for anything else."""
        found = parse_id(text)
        if not isinstance(found, HandoffId):
            raise ValueError(f"{text!r} names an attempt, not a hand-over")
        return found

    def __str__(self) -> str:
        return f"{self.attempt}/{self.number}"


def parse_id(text: str) -> AttemptId | HandoffId:
    """What an engine's request id says: a prompt engine's requests are attempts, a completion
    engine's are hand-overs. Raises ValueError for anything else."""
    match = _PATTERN.fullmatch(text)
    if match is None:
        raise ValueError(f"{text[:200]!r} is no id of an attempt or a hand-over")
    attempt = AttemptId(match[1], int(match[2]), int(match[3]))
    return attempt if match[4] is None else HandoffId(attempt, int(match[4]))


def attempt_named(text: str) -> AttemptId:
    """The attempt of a live request's id. A request restored from another role's snapshot keeps the
    name its user gave it: attempt 0, which no engine has had."""
    try:
        return attempt_of(parse_id(text))
    except ValueError:
        return AttemptId(text, 0, 0)


def attempt_of(found: AttemptId | HandoffId) -> AttemptId:
    return found.attempt if isinstance(found, HandoffId) else found
