"""Owner of the rows of the model's per-sequence state caches (sliding-window rings, compressor
state) of one rank."""

from __future__ import annotations


class StateManager:
    """Reference-counted rows 1 .. num_slots - 1; row 0 belongs to padding. num_slots 0: the model
    has no such caches."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, 0, -1))
        self._refs = [0] * num_slots

    @property
    def enabled(self) -> bool:
        return self.num_slots > 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def has_room(self) -> bool:
        """A sequence that needs a row can get one (always true when the model has no state)."""
        return not self.enabled or bool(self._free)

    def allocate(self) -> int:
        """A row with reference count 1, or -1 when the model has no state. Raises ValueError when
        none is free."""
        if not self.enabled:
            return -1
        if not self._free:
            raise ValueError(f"no free state slot: all {self.num_slots - 1} are held")
        row = self._free.pop()
        self._refs[row] = 1
        return row

    def pin(self, row: int) -> None:
        if self._refs[row] < 1:
            raise ValueError(f"cannot pin state slot {row}: it is free")
        self._refs[row] += 1

    def unpin(self, row: int) -> None:
        if self._refs[row] < 1:
            raise ValueError(f"state slot {row} is released more often than it was taken")
        self._refs[row] -= 1
        if not self._refs[row]:
            self._free.append(row)

    def check_integrity(self, held: list[int]) -> None:
        """held: the row of every holder, counted elsewhere. Raises AssertionError naming the
        difference."""
        expected = [0] * self.num_slots
        for row in held:
            expected[row] += 1
        if expected != self._refs:
            raise AssertionError(f"state slots: reference counts {self._refs}, held {expected}")
        free = sorted(self._free)
        if free != [row for row in range(1, self.num_slots) if not self._refs[row]]:
            raise AssertionError(
                f"state slots: free list {free} does not match reference counts {self._refs}"
            )
