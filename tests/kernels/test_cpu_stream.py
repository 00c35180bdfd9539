"""What a thread asks from memory stays just ahead of what it uses, however the stretches are cut."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from deepinfer_jax.kernels_pallas import cpu_native

COMPILER = shutil.which("c++")
PROGRAM = r"""
#include <cstdio>
#include "cpu_stream.h"

using deepinfer::Stream;

struct Stretches {  // of 0 to 999 bytes, some empty; counts what the stream has been given
  int64_t number = 0, given = 0;
  static bool next(void* of, const char** from, int64_t* bytes) {
    Stretches& s = *static_cast<Stretches*>(of);
    if (s.number == 100000) return false;
    const int64_t n = ++s.number * 7919 % 1500;
    *from = nullptr, *bytes = n < 500 ? 0 : n - 500;
    s.given += *bytes;
    return true;
  }
};

int main() {
  Stretches stretches;
  Stream stream(Stretches::next, &stretches);
  int64_t used = 0, least = 1 << 30, most = 0;
  stream.restart();
  for (int64_t i = 0; stretches.number < 100000; i++) {
    const int64_t n = i * 271 % 3000;
    stream.used(n), used += n;
    if (i < 1000) continue;
    least = std::min(least, stretches.given - used), most = std::max(most, stretches.given - used);
    for (int waits = 0; i % 50000 == 49999 && waits < 1000; waits++) stream.idle();
  }
  std::printf("%ld %ld\n", static_cast<long>(least), static_cast<long>(most));
}
"""


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_the_lead_neither_shrinks_nor_grows(tmp_path):
    (tmp_path / "lead.cc").write_text(PROGRAM)
    headers = Path(cpu_native.__file__).parent
    subprocess.run([COMPILER, "-std=c++17", "-O1", f"-I{headers}", tmp_path / "lead.cc", "-o", tmp_path / "lead"], check=True)
    least, most = map(int, subprocess.run([tmp_path / "lead"], check=True, capture_output=True, text=True).stdout.split())
    assert least >= (8 << 10) - 3000 and most < (16 << 10) + 2000
