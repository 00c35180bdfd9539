// Weights as a custom call's operands: a kernel and, for the quantised formats, its companions.
#pragma once

#include "digits.h"
#include "ffi.h"
#include "product.h"
#include "wide.h"

namespace deepinfer {

// A chunk by the way that suits its format and number of rows.
template <typename W> void run(const Weights& w, int64_t rows, const float* x, float* y, int64_t n0,
                               int64_t n1, int64_t id) {
  if (rows >= WIDE_FROM) return run_wide<W>(w, rows, x, y, n0, n1, id);
#if defined(DEEPINFER_DIGITS)
  if (rows <= DIGIT_ROWS && w.k <= MAX_DIGIT_INPUTS) {
    if constexpr (std::is_same_v<W, Int8>) return run_digits<Bytes>(w, rows, x, y, n0, n1, id);
    if constexpr (std::is_same_v<W, Int4>) return run_digits<Nibbles>(w, rows, x, y, n0, n1, id);
  }
#endif
  run_block<W>(w, rows, x, y, n0, n1);
}

struct StoredWeights {
  Weights w;
  int64_t parts = 0;  // how many operands they take
  int64_t bits = 0, streamed_rows = STREAMED_ROWS;
  decltype(Product::block) block = nullptr;

  template <typename W> bool use() {
    block = run<W>, bits = W::bits;
#if defined(DEEPINFER_DIGITS)
    if (W::bits <= 8 && w.k <= MAX_DIGIT_INPUTS) streamed_rows = DIGIT_ROWS;
#endif
    return true;
  }

  void plan(Product& product, const float* x, float* y, int64_t m, int64_t threads, int64_t columns,
            int64_t unit = ROWS) const {
    product.plan(x, y, w, block, bits, m <= streamed_rows, m, threads, columns, unit);
  }

  // Operands from `first` on, for products with k inputs; false if they are no weights of that
  // width.
  bool read(const XLA_FFI_CallFrame* frame, int64_t first, int64_t k) {
    if (first >= frame->args.size) return false;
    const XLA_FFI_Buffer* kernel = argument(frame, first);
    const bool packed = kernel->dtype == XLA_FFI_DataType_U8,
               scaled = packed || kernel->dtype == XLA_FFI_DataType_S8;
    parts = 1 + packed + scaled;
    if (first + parts > frame->args.size || kernel->rank != 2 ||
        kernel->dims[1] * (packed ? 2 : 1) != k || (packed && k % (2 * GROUP)))
      return false;
    w = {kernel->data,
         packed ? argument(frame, first + 1)->data : nullptr,
         scaled ? data<const float>(argument(frame, first + 1 + packed)) : nullptr,
         kernel->dims[0],
         k,
         k};
    switch (kernel->dtype) {
      case XLA_FFI_DataType_F32: return use<Float32>();
      case XLA_FFI_DataType_BF16: return use<BFloat16>();
      case XLA_FFI_DataType_S8: return use<Int8>();
      case XLA_FFI_DataType_U8: return use<Int4>();
      default: return false;
    }
  }
};

}  // namespace deepinfer
