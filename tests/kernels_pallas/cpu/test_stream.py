"""What a thread asks from memory stays just ahead of what it uses, however the stretches are cut,
and is what it uses, to the byte."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import jax
import pytest

from deepinfer_jax.kernels_pallas.cpu import native as cpu_native

COMPILER = shutil.which("c++")
LEAD = r"""
#include <cstdio>
#include "stream.h"

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


ACCOUNTS = r"""
#include <cstdio>
#include <vector>
#include "attention.h"
#include "weights.h"

using namespace deepinfer;

bool even = true;
template <typename T> int64_t announced(const T& reader, int64_t chunks) {
  int64_t sum = 0, bytes = 0;
  const char* from = nullptr;
  for (int64_t chunk = 0; chunk < chunks; chunk++)
    for (int64_t part = 0; reader.reads(chunk, part, &from, &bytes); part++) sum += bytes;
  return sum;
}
void expect(const char* what, int64_t a, int64_t b, int64_t announced, int64_t used) {
  if (announced == used) return;
  even = false;
  std::printf("%s %ld %ld: announced %ld, used %ld\n", what, a, b, announced, used);
}

struct Chunks {  // a product's, as a job has them
  const Product& product;
  bool reads(int64_t chunk, int64_t part, const char** from, int64_t* bytes) const {
    const auto p = product.part(chunk, product.w.n);
    return product.reads(p.n0, p.n1, part, from, bytes);
  }
};

template <typename W> void products(const char* format) {
  const int64_t n = 401, k = 192;
  std::vector<char> data(n * k * W::bits / 8, 1), groups(n * k / GROUP, 1);
  std::vector<float> scales(n, 1.f), x(16 * k, 1.f), y(16 * n);
  for (int64_t m : {1, 2, 3, 8, 9, 16}) {
    StoredWeights weights;
    const bool packed = W::bits == 4, scaled = W::bits <= 8;
    weights.w = {data.data(), packed ? groups.data() : nullptr,
                 scaled ? scales.data() : nullptr, n, k, k};
    weights.use<W>();
    Product product;
    weights.plan(product, x.data(), y.data(), m, 2, n);
    Stream counted;
    stream(&counted);
    for (int64_t i = 0; i < product.chunks; i++) product.run(product.part(i, n));
    const int64_t asked = announced(Chunks{product}, product.chunks);
    expect(format, m, product.streamed, asked, counted.total());
    if (m <= 2 && !product.streamed) even = false, std::printf("%s: not streamed\n", format);
  }
}

template <typename T> void attention(int64_t sequences, int64_t window, int64_t threads) {
  const int64_t bs = 16, kv_heads = 3, group = 3, d = 64, pages = 64, blocks = sequences * pages;
  std::vector<T> keys(blocks * bs * kv_heads * d), values(keys.size());
  std::vector<int32_t> tables(blocks);
  std::shared_ptr<int32_t[]> lens(new int32_t[sequences]);
  for (int64_t i = 0; i < blocks; i++) tables[i] = static_cast<int32_t>(blocks - 1 - i);
  for (int64_t i = 0; i < sequences; i++)
    lens[i] = static_cast<int32_t>((i * 337 + 900) % 1024);
  Decode decode{{keys.data(), values.data(), sizeof(T) == 2, blocks, bs, kv_heads, d, d, true},
                tables.data(), lens, nullptr, sequences, pages, group * kv_heads, 1, window,
                1.f};
  decode.plan(threads);
  std::vector<float> q(MAX_ROWS * d, 1.f), partial(MAX_ROWS * (2 + d));
  Stream counted;
  stream(&counted);
  for (int64_t i = 0; i < decode.units * decode.spans; i++) {
    const Partial p{partial.data(), partial.data() + MAX_ROWS, partial.data() + 2 * MAX_ROWS};
    decode.attend_span(decode.unit_of(i), decode.span_of(i), q.data(), p);
  }
  const int64_t asked = announced(decode, decode.units * decode.spans);
  expect("attention", sequences, window, asked, counted.total());
  if (!counted.total()) even = false, std::printf("attention: nothing read\n");
}

int main() {
  products<Float32>("float32");
  products<BFloat16>("bfloat16");
  products<Int8>("int8");
  products<Int4>("int4");
  for (int64_t sequences : {1, 2, 7})
    for (int64_t window : {0, 100}) {
      attention<float>(sequences, window, 2);
      attention<uint16_t>(sequences, window, 1);
    }
  if (even) std::printf("even\n");
}
"""


def output_of(program: str, tmp_path: Path, *flags: str) -> str:
    (tmp_path / "program.cc").write_text(program)
    includes = [f"-I{Path(cpu_native.__file__).parent}", f"-I{jax.ffi.include_dir()}"]
    command = [
        COMPILER,
        "-std=c++17",
        *flags,
        *includes,
        tmp_path / "program.cc",
        "-o",
        tmp_path / "program",
    ]
    subprocess.run(command, check=True)
    return subprocess.run([tmp_path / "program"], check=True, capture_output=True, text=True).stdout


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_the_lead_neither_shrinks_nor_grows(tmp_path):
    least, most = map(int, output_of(LEAD, tmp_path, "-O1").split())
    assert least >= (8 << 10) - 3000 and most < (16 << 10) + 2000


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_what_is_announced_is_what_is_used(tmp_path):
    assert output_of(ACCOUNTS, tmp_path, "-O1", "-march=native", "-Wall", "-Werror") == "even\n"
