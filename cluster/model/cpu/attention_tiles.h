// Register tiles of attention's two products, and K and V packed for them. Part of attention.cpp.

#pragma once

#include <array>
#include <type_traits>
#include <utility>

#include "common.h"
#include "matrix_unit.h"

namespace {

constexpr int kMostRows = 32;         // of a register tile
constexpr int kKeys = 128;            // of a block
constexpr int kSplit = 4 * kKeys;     // keys of an item where a context is split
// query rows times keys of a call that one thread does in 70 us; waking another takes 20
constexpr int64_t kSerialPairs = 1 << 14;
constexpr int kTile = 128;            // query rows of an item
constexpr int kMaxWidth = 256;        // of K and of V
constexpr int kGroup = 64;            // channels that share a scale
constexpr float kLowest = -1e30f;     // maximum of no scores; finite, so that differences are numbers
constexpr float kLog2E = 1.44269504f;

inline void narrow(float* p, Floats value) { store(p, value); }
inline void narrow(BFloat16* p, Floats value) { store(p, halves_of(value)); }
template <class Element>
inline void narrow(Element* p, Floats low, Floats high) {
  narrow(p, low);
  narrow(p + kLanes, high);
}
#if defined(__AVX512BF16__)
// One store: a load that spans two smaller ones waits for both.
inline void narrow(BFloat16* p, Floats low, Floats high) {
  store(p, (Words)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
}
#endif

// 2^x; 0 below -126. Relative error below 1e-7, or 8e-5 where the result is rounded to bfloat16 anyway.
template <bool kCoarse>
inline Floats power_of_two(Floats x) {
  const Floats shifted = x + 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, found in the low bits
  const Floats r = x - (shifted - 12582912.0f);
  Floats p;
  if constexpr (kCoarse) {
    p = ((r * 0.0551716649f + 0.242611122f) * r + 0.693260986f) * r + 0.999928074f;
  } else {
    p = (r * 0.00132764715f + 0.00967554133f) * r + 0.0555071327f;
    p = ((p * r + 0.240221197f) * r + 0.693146967f) * r + 1.0f;
  }
  const Floats result = (Floats)((Words)p + ((Words)shifted << 23));
  return (Floats)((Ints)result & (Ints)(x >= -126.0f));
}

inline Floats capped(Floats x, float softcap) {  // softcap * tanh(x / softcap)
  const Floats bounded = larger(splat(-40), -larger(splat(-40), x * (-2 * kLog2E / softcap)));  // |..| <= 40
  const Floats e = power_of_two<false>(bounded);
  return softcap * ((e - 1.0f) / (e + 1.0f));
}

// ------------------------------------------------------------------------------------------------------ the products

// kElements: in a word. Products: how tiles are multiplied (below).
struct VectorProducts;
struct MatrixProducts;
struct Float32 {
  using Element = float;
  using Products = VectorProducts;
  static constexpr int kElements = 1;
  static constexpr bool kCoarse = false;
  static Floats add(Floats sum, Floats a, Floats b) { return sum + a * b; }
};
#if defined(__AVX512BF16__)
struct BFloat16Pair {
  using Element = BFloat16;
  static constexpr int kElements = 2;
#if defined(__AMX_TILE__)
  using Products = MatrixProducts;
#else
  using Products = VectorProducts;
#endif
  static constexpr bool kCoarse = true;
  static Floats add(Floats sum, Floats a, Floats b) {
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
  }
  // 32 channels of two rows; in each word of the result the two values of one channel.
  struct Pairs {
    Floats low, high;
  };
  static Pairs paired(const float* even, const float* odd) {
    alignas(64) static constexpr auto kOrder = [] {
      std::array<uint16_t, 64> order{};
      for (int i = 0; i < 64; i++) order[i] = i / 2 + i % 2 * 32;
      return order;
    }();
    const __m512i a = _mm512_loadu_si512(even), b = _mm512_loadu_si512(odd);
    return {(Floats)_mm512_permutex2var_epi16(a, _mm512_load_si512(kOrder.data()), b),
            (Floats)_mm512_permutex2var_epi16(a, _mm512_load_si512(kOrder.data() + 32), b)};
  }
};
#endif

// c[r, :] = factors[r] * c[r, :] + sum over k < depth of a[r, k] * b[k, :]; no factors: as if c were 0.
template <class Word, int kHeight, int kWidth>
inline void product_tile(const float* a, int64_t lda, const float* b, int64_t ldb, int64_t depth, float* c, int64_t ldc,
                         const float* factors) {
  Floats sums[kHeight][kWidth];
#pragma GCC unroll 8
  for (int r = 0; r < kHeight; r++)
#pragma GCC unroll 8
    for (int v = 0; v < kWidth; v++)
      sums[r][v] = factors ? load<Floats>(c + r * ldc + v * kLanes) * factors[r] : Floats{};
  for (int64_t k = 0; k < depth; k++) {
    Floats columns[kWidth];
#pragma GCC unroll 8
    for (int v = 0; v < kWidth; v++) columns[v] = load<Floats>(b + k * ldb + v * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < kHeight; r++) {
      const Floats x = splat_word(a + r * lda + k);
#pragma GCC unroll 8
      for (int v = 0; v < kWidth; v++) sums[r][v] = Word::add(sums[r][v], x, columns[v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kHeight; r++)
#pragma GCC unroll 8
    for (int v = 0; v < kWidth; v++) store(c + r * ldc + v * kLanes, sums[r][v]);
}

template <class Word, int kHeight>
void product_rows(int64_t vectors, const float* a, int64_t lda, const float* b, int64_t ldb, int64_t depth, float* c,
                  int64_t ldc, const float* factors) {
  for (; vectors >= kVectors; vectors -= kVectors, b += kVectors * kLanes, c += kVectors * kLanes)
    product_tile<Word, kHeight, kVectors>(a, lda, b, ldb, depth, c, ldc, factors);
  if constexpr (kVectors > 2) {
    if (vectors >= 2) {
      product_tile<Word, kHeight, 2>(a, lda, b, ldb, depth, c, ldc, factors);
      vectors -= 2, b += 2 * kLanes, c += 2 * kLanes;
    }
  }
  if (vectors) product_tile<Word, kHeight, 1>(a, lda, b, ldb, depth, c, ldc, factors);
}

// For an item: products of up to kRows rows times some vectors, as product_tile. first_row: of tile t. kDepth: what the depth
// of a product is padded to.
struct VectorProducts {
  static constexpr int64_t kRows = 6, kDepth = 1;
  static int64_t first_row(int64_t t, int64_t tiles, int64_t rows) { return rows * t / tiles; }  // of nearly equal height

  template <class Word>
  void multiply(int64_t rows, int64_t vectors, const float* a, int64_t lda, const float* b, int64_t ldb, int64_t depth,
                float* c, int64_t ldc, const float* factors) {
    switch (rows) {
      case 1: return product_rows<Word, 1>(vectors, a, lda, b, ldb, depth, c, ldc, factors);
      case 2: return product_rows<Word, 2>(vectors, a, lda, b, ldb, depth, c, ldc, factors);
      case 3: return product_rows<Word, 3>(vectors, a, lda, b, ldb, depth, c, ldc, factors);
      case 4: return product_rows<Word, 4>(vectors, a, lda, b, ldb, depth, c, ldc, factors);
      case 5: return product_rows<Word, 5>(vectors, a, lda, b, ldb, depth, c, ldc, factors);
      case 6: return product_rows<Word, 6>(vectors, a, lda, b, ldb, depth, c, ldc, factors);
    }
  }
};

#if defined(__AMX_TILE__)
// As VectorProducts, on the matrix unit. Every other height or depth would take as long to configure as a tile to compute.
struct MatrixProducts {
  static constexpr int64_t kRows = MatrixUnit::kRows, kDepth = MatrixUnit::kWords;
  static int64_t first_row(int64_t t, int64_t, int64_t rows) { return std::min(t * kRows, rows); }

  template <class Word>
  void multiply(int64_t rows, int64_t vectors, const float* a, int64_t lda, const float* b, int64_t ldb, int64_t depth,
                float* c, int64_t ldc, const float* factors) {
    for (int64_t r = 0; factors && r < rows; r++)
      if (factors[r] != 1.0f)
        for (int64_t v = 0; v < vectors; v++)
          store(c + r * ldc + v * kLanes, load<Floats>(c + r * ldc + v * kLanes) * factors[r]);
    unit.multiply<BFloat16Matrix>({(const char*)a, lda * 4, (const char*)b, ldb * 4, (char*)c, ldc * 4, !factors}, rows,
                                  vectors, depth, [] {});
  }
  MatrixUnit unit;
};
#endif

// ---------------------------------------------------------------------------------------------------- packing K and V

constexpr int64_t padded(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// One head's rows of K (or V) in the blocks.
template <class Stored>
struct Rows {
  const Stored* data;
  const _Float16* scales;
  int64_t heads, head, width, groups;

  // Row `slot` as elements of a product, in `buffer` or where it lies; zeros up to a multiple of kLanes words.
  template <class Word>
  const float* words(int64_t slot, float* buffer) const {
    using Element = typename Word::Element;
    constexpr int64_t kUnit = kLanes * Word::kElements;
    const int64_t row = slot * heads + head;
    const Stored* source = data + row * width;
    if constexpr (std::is_same_v<Stored, Element>) {
      if (width % kUnit == 0) return (const float*)source;
    }
    Element* target = (Element*)buffer;
    for (int64_t first = 0; first < width; first += kGroup) {
      const float factor = std::is_same_v<Stored, int8_t> ? (float)scales[row * groups + first / kGroup] : 1.0f;
      const int64_t end = std::min<int64_t>(first + kGroup, width), whole = end / kLanes * kLanes;
      int64_t i = first;
      for (; i + 2 * kLanes <= whole; i += 2 * kLanes)
        narrow(target + i, scaled(widened(source + i), factor), scaled(widened(source + i + kLanes), factor));
      for (; i < whole; i += kLanes) narrow(target + i, scaled(widened(source + i), factor));
      if (whole < end) {
        alignas(64) Stored tail[kLanes] = {};
        std::memcpy(tail, source + whole, (end - whole) * sizeof(Stored));
        narrow(target + whole, scaled(widened(tail), factor));
      }
    }
    for (int64_t i = padded(width, kLanes); i < padded(width, kUnit); i += kLanes) narrow(target + i, Floats{});
    return buffer;
  }
  static Floats scaled(Floats value, float factor) {
    if constexpr (std::is_same_v<Stored, int8_t>) return value * factor;
    return value;
  }
  // Inlined by force: GCC drops calls of a function that does nothing else.
  __attribute__((always_inline)) void prefetch(int64_t slot, int64_t of_head) const {
    if (slot < 0) return;
    const char* row = (const char*)(data + (slot * heads + of_head) * width);
    for (int64_t i = 0; i < width * (int64_t)sizeof(Stored); i += 64) _mm_prefetch(row + i, _MM_HINT_T1);
  }
};

// A vector of 4 words each of rows first, first + 4, first + 8, …
inline Floats quarters(const float* const* sources, int first, int64_t offset) {
  const __m128 low = _mm_loadu_ps(sources[first] + offset);
#if defined(__AVX512F__)
  __m512 x = _mm512_castps128_ps512(low);
  x = _mm512_mask_broadcast_f32x4(x, 0x00f0, _mm_loadu_ps(sources[first + 4] + offset));
  x = _mm512_mask_broadcast_f32x4(x, 0x0f00, _mm_loadu_ps(sources[first + 8] + offset));
  return (Floats)_mm512_mask_broadcast_f32x4(x, 0xf000, _mm_loadu_ps(sources[first + 12] + offset));
#else
  return (Floats)_mm256_insertf128_ps(_mm256_castps128_ps256(low), _mm_loadu_ps(sources[first + 4] + offset), 1);
#endif
}

// Interleaves words (or pairs of words) within each four: of the low half of both, or of the high half.
template <int kUnit, bool kHigh, int... kLane>
inline Floats interleaved(Floats a, Floats b, std::integer_sequence<int, kLane...>) {
  constexpr int kHalf = kHigh ? 2 : 0;
  return __builtin_shufflevector(a, b, (kLane / 4 * 4 + kHalf + (kUnit == 1 ? kLane % 4 / 2 : kLane % 2) +
                                        ((kUnit == 1 ? kLane % 2 : kLane % 4 / 2) ? kLanes : 0))...);
}

// target[k, lane] = sources[lane][k]: kLanes by kLanes words.
inline void transpose(const float* const* sources, int64_t offset, float* target, int64_t stride) {
  constexpr std::make_integer_sequence<int, kLanes> kAll{};
#pragma GCC unroll 4
  for (int k = 0; k < kLanes; k += 4) {
    const Floats a = quarters(sources, 0, offset + k), b = quarters(sources, 1, offset + k);
    const Floats c = quarters(sources, 2, offset + k), d = quarters(sources, 3, offset + k);
    const Floats ab = interleaved<1, false>(a, b, kAll), cd = interleaved<1, false>(c, d, kAll);
    const Floats ab_high = interleaved<1, true>(a, b, kAll), cd_high = interleaved<1, true>(c, d, kAll);
    store(target + k * stride, interleaved<2, false>(ab, cd, kAll));
    store(target + (k + 1) * stride, interleaved<2, true>(ab, cd, kAll));
    store(target + (k + 2) * stride, interleaved<2, false>(ab_high, cd_high, kAll));
    store(target + (k + 3) * stride, interleaved<2, true>(ab_high, cd_high, kAll));
  }
}

// What one thread works in.
struct Scratch {
  alignas(64) float queries[kTile * kMaxWidth], outputs[kTile * kMaxWidth], keys[kMaxWidth * kKeys];
  alignas(64) float values[kKeys * kMaxWidth], scores[kMostRows * kKeys], rows[kLanes * kMaxWidth], zeros[kMaxWidth];
  alignas(64) float maxima[kTile], sums[kTile * kLanes];  // the sums of a row still spread over lanes
  int32_t begins[kTile], ends[kTile];
  int64_t slots[kKeys], next_slots[kKeys];  // of this block's keys and of those fetched ahead; -1: no row is read
  int64_t next_head;
};

// target[k, key] = word k of each key's row; keys rounded up to kLanes.
template <class Word, class Stored>
void pack_keys(const Rows<Stored>& rows, int64_t keys, Scratch& scratch) {
  const int64_t words = padded(rows.width, kLanes * Word::kElements) / Word::kElements;
  for (int64_t first = 0; first < keys; first += kLanes) {
    const float* sources[kLanes];
    for (int lane = 0; lane < kLanes; lane++) {
      const int64_t slot = scratch.slots[first + lane];
      sources[lane] = slot < 0 ? scratch.zeros : rows.template words<Word>(slot, scratch.rows + lane * kMaxWidth);
    }
    for (int64_t k = 0; k < words; k += kLanes) transpose(sources, k, scratch.keys + k * kKeys + first, kKeys);
  }
}

// target[key or pair of keys, channel]; channels rounded up to kLanes.
template <class Word, class Stored>
void pack_values(const Rows<Stored>& rows, int64_t keys, Scratch& scratch) {
  const int64_t width = padded(rows.width, kLanes);
  for (int64_t key = 0; key < keys; key += Word::kElements) {
    float* target = scratch.values + key / Word::kElements * width;
    const float* sources[Word::kElements];
    for (int i = 0; i < Word::kElements; i++) {
      const int64_t slot = scratch.slots[key + i];
      rows.prefetch(scratch.next_slots[key + i], scratch.next_head);
      float* buffer = Word::kElements == 1 ? target : scratch.rows + i * kMaxWidth;
      sources[i] = slot < 0 ? scratch.zeros : rows.template words<Word>(slot, buffer);
    }
    if constexpr (Word::kElements == 1) {
      if (sources[0] != target) std::memcpy(target, sources[0], width * sizeof(float));
    } else {
      for (int64_t i = 0; i < width; i += 2 * kLanes) {
        const auto pairs = Word::paired(sources[0] + i / 2, sources[1] + i / 2);
        store(target + i, pairs.low);
        if (i + kLanes < width) store(target + i + kLanes, pairs.high);
      }
    }
  }
}

}  // namespace
