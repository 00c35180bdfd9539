"""Names of the arrays that the attention ops share; `paged_decode` says what they hold."""

from __future__ import annotations

from jaxtyping import Array, Float, Int32

Queries = Float[Array, "T H D"]
Attended = Float[Array, "T H Dv"]
Keys = Float[Array, "N bs KH D"]
Values = Float[Array, "N bs KH Dv"]
Tables = Int32[Array, "S P"]
Lens = Int32[Array, " S"]
Starts = Int32[Array, " S+1"]
SeqIds = Int32[Array, " T"]
Sinks = Float[Array, " H"]
