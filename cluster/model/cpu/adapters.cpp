// What LoRA adapters make of the rows that go into a product: A x, by row and adapter. linear.cpp adds B (A x) to the product's
// sums.
//
// A decode step reads each adapter once, so its time is that of the bytes. A lies in groups of kDownRows rows, of which
// kDownBytes follow each other in turn: a group is one stream. The sum of an element runs over the inputs in one order for
// any number of rows.

#include "common.h"
#include "kernels.h"

namespace {

using kernels::kDownRows;

constexpr int64_t kDownBytes = 64;         // of a row of A, then as many of the next one
constexpr int64_t kDownAhead = 4 << 10;    // bytes of A that are fetched ahead
constexpr int kMostRows = kLanes / 8 + 1;  // of x at a time: as many as leave their sums in registers; AVX2 spills a little

inline void add_products(Floats& sum, Words x, Words a, float) { sum += (Floats)x * (Floats)a; }
inline void add_products(Floats& sum, Words x, Words a, BFloat16) {
#if defined(__AVX512BF16__)
  sum = (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)a);
#else
  sum += (Floats)(x << 16) * (Floats)(a << 16);
  sum += (Floats)(x & 0xffff0000u) * (Floats)(a & 0xffff0000u);
#endif
}

// One group of A times kRows rows of x. y: of each row, where its first sum goes.
template <class Element, int kRows>
void multiply_group(const Element* const* x, const char* a, int64_t inputs, Element* const* y) {
  constexpr int64_t kInputs = kDownBytes / sizeof(Element);
  Floats sums[kRows][kDownRows] = {};
  const auto add = [&](const Element* const* rows, int64_t input) __attribute__((always_inline)) {
    for (int64_t half = 0; half < kDownBytes; half += kVectorBytes) {
      Words words[kRows];
      for (int r = 0; r < kRows; r++) words[r] = load<Words>((const char*)(rows[r] + input) + half);
#pragma GCC unroll 8
      for (int64_t o = 0; o < kDownRows; o++) {
        const Words weights = load<Words>(a + o * kDownBytes + half);
        for (int r = 0; r < kRows; r++) add_products(sums[r][o], words[r], weights, Element{});
      }
    }
  };
  int64_t input = 0;
  for (; input + kInputs <= inputs; input += kInputs, a += kDownRows * kDownBytes) {
    for (int64_t o = 0; o < kDownRows; o++) __builtin_prefetch(a + kDownAhead + o * kDownBytes);
    add(x, input);
  }
  if (input < inputs) {
    Element last[kRows][kInputs] = {};
    const Element* rows[kRows];
    for (int r = 0; r < kRows; r++) {
      std::memcpy(last[r], x[r] + input, (inputs - input) * sizeof(Element));
      rows[r] = last[r];
    }
    add(rows, 0);
  }
  for (int r = 0; r < kRows; r++) {
    float all[kLanes] = {};
    for (int64_t o = 0; o < kDownRows; o++) all[o] = sum_of(sums[r][o]);
    store_some(y[r], kDownRows, load<Floats>(all));
  }
}

template <class Element, int kRows = kMostRows>
void multiply_rows(const Element* const* x, int64_t rows, const char* a, int64_t inputs, Element* const* y) {
  for (; rows >= kRows; rows -= kRows, x += kRows, y += kRows) multiply_group<Element, kRows>(x, a, inputs, y);
  if constexpr (kRows > 1) multiply_rows<Element, kRows - 1>(x, rows, a, inputs, y);
}

template <class Element>
void down_rows(const Layer& layer, const LayerAdapter& adapter, const Element* x, const int64_t* rows, int64_t count,
               int64_t group, Element* y) {
  const int64_t chunks = (layer.inputs * sizeof(Element) + kDownBytes - 1) / kDownBytes;
  const char* a = (const char*)adapter.down + group * chunks * kDownRows * kDownBytes;
  const Element* sources[kernels::kRunRows];
  Element* targets[kernels::kRunRows];
  for (int64_t i = 0; i < count; i++) {
    sources[i] = x + rows[i] * layer.inputs;
    targets[i] = y + rows[i] * layer.down_width + group * kDownRows;
  }
  multiply_rows<Element>(sources, count, a, layer.inputs, targets);
}

}  // namespace

namespace kernels {

void adapter_down(bool is_bf16, const Layer& layer, const LayerAdapter& adapter, const void* x, const int64_t* rows,
                  int64_t count, int64_t group, void* y) {
  if (!adapter.down || group * kDownRows >= layer.parts * adapter.rank) return;
  if (is_bf16)
    down_rows(layer, adapter, (const BFloat16*)x, rows, count, group, (BFloat16*)y);
  else
    down_rows(layer, adapter, (const float*)x, rows, count, group, (float*)y);
}

}  // namespace kernels
