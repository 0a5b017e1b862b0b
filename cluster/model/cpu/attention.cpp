// Attention over paged K and V, for decode and for prefill chunks, and the writing of K and V into their blocks.
//
// One item of work is (sequence, KV head, tile of query rows, range of keys); the query heads that share a KV head are
// rows of the same tile, so K and V are read once for all of them. An item walks over blocks of keys: K is packed
// transposed, V by rows, S = Q K^T, online softmax in float32, O += P V. Operands of both products are 32 bit words: a
// float or a pair of bfloat16. Where the new tokens of a sequence fit in one tile and its context is long, its keys are
// split over several items and merged at the end. Blocks and splits start at multiples of absolute positions and rows do
// not mix: a sequence's result depends neither on its company in the batch nor on the number of threads.
//
// What a query token sees is a range [begin, end) of key positions; causality, windows and two-way spans are made of it.
// Plain C interface, no state. Compiled for AVX-512 with BF16, for AVX-512, and for AVX2 with FMA and F16C.

#include <immintrin.h>
#include <omp.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

extern "C" {
struct AttentionStep {          // the same for all layers of a step that share a window
  const int64_t* tables;        // [sequences, table_width] block ids
  const int32_t* query_starts;  // [sequences + 1] first new token of each sequence
  const int32_t* begins;        // [tokens]
  const int32_t* ends;          // [tokens]
  int64_t sequences, table_width, block_size, threads;
};

struct AttentionCall {
  const void *query, *key, *key_scales, *value, *value_scales;  // scales: null where the cache is plain
  const float* sinks;                                           // [query_heads] or null
  void* out;                                                    // [tokens, query_heads, value_width]
  int64_t query_token_stride, query_head_stride;                // elements
  int64_t query_heads, kv_heads, key_width, value_width;
  int64_t is_bf16;         // of the query and the output, and of K and V in a plain cache; else float32
  double scale, softcap;  // softcap 0: none
};

struct WriteCall {
  const void* rows;       // [tokens, heads, width]
  const int64_t* slots;   // [tokens]
  void *target, *scales;  // blocks; scales: null where the cache is plain and rows are copied as they are
  int64_t tokens, heads, width, token_stride, head_stride, is_bf16, threads;
};
}

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16, kVectors = 4;
#else
constexpr int kLanes = 8, kVectors = 2;
#endif
constexpr int kRows = 6;              // of a register tile; kVectors vectors wide
constexpr int kKeys = 128;            // of a block
constexpr int kSplit = 4 * kKeys;     // keys of an item where a context is split
constexpr int64_t kSerialPairs = 1 << 14;  // query rows times keys of a call that one thread does in 70 us; waking another takes 20
constexpr int kTile = 128;            // query rows of an item
constexpr int kMaxWidth = 256;        // of K and of V
constexpr int kGroup = 64;            // channels that share a scale
constexpr float kLowest = -1e30f;     // maximum of no scores; finite, so that differences are numbers
constexpr float kLog2E = 1.44269504f;

typedef float Floats __attribute__((vector_size(kLanes * 4), may_alias));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4), may_alias));
typedef uint32_t Words __attribute__((vector_size(kLanes * 4), may_alias));
typedef uint16_t Halves __attribute__((vector_size(kLanes * 2), may_alias));
typedef int8_t Bytes __attribute__((vector_size(kLanes), may_alias));
struct BFloat16 {
  uint16_t bits;
};

template <class Vector>
inline Vector load(const void* source) {
  Vector value;
  std::memcpy(&value, source, sizeof(value));
  return value;
}
template <class Vector>
inline void store(void* target, Vector value) {
  std::memcpy(target, &value, sizeof(value));
}
inline Floats splat(float value) { return value - Floats{}; }  // a sum would change -0
inline Floats splat_word(const float* p) { return (Floats)(load<uint32_t>(p) | Words{}); }

inline Floats widened(const float* p) { return load<Floats>(p); }
#if defined(__AVX512F__)
inline Words words_of(Halves value) { return (Words)_mm512_cvtepu16_epi32((__m256i)value); }
inline Ints words_of(Bytes value) { return (Ints)_mm512_cvtepi8_epi32((__m128i)value); }
#else
inline Words words_of(Halves value) { return __builtin_convertvector(value, Words); }
inline Ints words_of(Bytes value) { return __builtin_convertvector(value, Ints); }
#endif
inline Floats widened(const BFloat16* p) { return (Floats)(words_of(load<Halves>(p)) << 16); }
inline Floats widened(const int8_t* p) { return __builtin_convertvector(words_of(load<Bytes>(p)), Floats); }
inline Halves rounded(Floats value) {  // to bfloat16, nearest even
#if defined(__AVX512BF16__)
  return (Halves)_mm512_cvtneps_pbh((__m512)value);
#else
  const Words bits = (Words)value;
  return __builtin_convertvector((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16, Halves);
#endif
}
inline void narrow(float* p, Floats value) { store(p, value); }
inline void narrow(BFloat16* p, Floats value) { store(p, rounded(value)); }
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

#if defined(__AVX512F__)
inline Floats larger(Floats a, Floats b) { return (Floats)_mm512_max_ps((__m512)a, (__m512)b); }
inline float largest(Floats value) { return _mm512_reduce_max_ps((__m512)value); }
inline float sum_of(Floats value) { return _mm512_reduce_add_ps((__m512)value); }
inline Ints nearest(Floats value) { return (Ints)_mm512_cvtps_epi32((__m512)value); }
#else
inline Floats larger(Floats a, Floats b) { return (Floats)_mm256_max_ps((__m256)a, (__m256)b); }
inline float largest(Floats value) {
  float result = value[0];
  for (int lane = 1; lane < kLanes; lane++) result = std::max(result, value[lane]);
  return result;
}
inline float sum_of(Floats value) {
  float sum = 0;
  for (int lane = 0; lane < kLanes; lane++) sum += value[lane];
  return sum;
}
inline Ints nearest(Floats value) { return (Ints)_mm256_cvtps_epi32((__m256)value); }
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

struct Float32 {
  using Element = float;
  static constexpr int kElements = 1;  // in a word
  static constexpr bool kCoarse = false;
  static Floats add(Floats sum, Floats a, Floats b) { return sum + a * b; }
};
#if defined(__AVX512BF16__)
struct BFloat16Pair {
  using Element = BFloat16;
  static constexpr int kElements = 2;
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

template <class Word>
void product(int64_t rows, int64_t vectors, const float* a, int64_t lda, const float* b, int64_t ldb, int64_t depth,
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

// What one thread works in; lives on its stack.
struct Scratch {
  alignas(64) float queries[kTile * kMaxWidth], outputs[kTile * kMaxWidth], keys[kMaxWidth * kKeys];
  alignas(64) float values[kKeys * kMaxWidth], scores[kRows * kKeys], rows[kLanes * kMaxWidth], zeros[kMaxWidth];
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
    const float* sources[Word::kElements];
    for (int i = 0; i < Word::kElements; i++) {
      const int64_t slot = scratch.slots[key + i];
      rows.prefetch(scratch.next_slots[key + i], scratch.next_head);
      sources[i] = slot < 0 ? scratch.zeros : rows.template words<Word>(slot, scratch.rows + i * kMaxWidth);
    }
    float* target = scratch.values + key / Word::kElements * width;
    if constexpr (Word::kElements == 1) {
      for (int64_t i = 0; i < width; i += kLanes) store(target + i, load<Floats>(sources[0] + i));
    } else {
      for (int64_t i = 0; i < width; i += 2 * kLanes) {
        const auto pairs = Word::paired(sources[0] + i / 2, sources[1] + i / 2);
        store(target + i, pairs.low);
        if (i + kLanes < width) store(target + i + kLanes, pairs.high);
      }
    }
  }
}

// --------------------------------------------------------------------------------------------------------- the softmax

// Turns a row of scores (keys, a multiple of kLanes) into elements of P where they lie. `begin` and `end` are relative to the
// block. Updates the row's maximum and sums; returns the factor that is due to what was summed before.
template <class Word>
float softmax_row(float* scores, int64_t keys, int64_t begin, int64_t end, float scale, float softcap, float& maximum,
                  float* sums) {
  Floats lanes;
  for (int lane = 0; lane < kLanes; lane++) lanes[lane] = lane;
  Floats highest = splat(maximum);
  const bool whole = begin <= 0 && end >= keys;
  for (int64_t i = 0; i < keys; i += kLanes) {
    Floats x = load<Floats>(scores + i) * scale;
    if (softcap != 0) x = capped(x, softcap) * kLog2E;
    if (!whole) {
      const Floats position = lanes + (float)i;
      x = (position >= (float)begin) & (position < (float)end) ? x : splat(-INFINITY);
    }
    store(scores + i, x);
    highest = larger(highest, x);
  }
  const float before = maximum;
  maximum = largest(highest);
  const Floats shift = splat(maximum);
  Floats added = {};
  typename Word::Element* target = (typename Word::Element*)scores;
  for (int64_t i = 0; i < keys; i += kLanes) {
    const Floats p = power_of_two<Word::kCoarse>(load<Floats>(scores + i) - shift);
    added += p;
    narrow(target + i, p);
  }
  const float factor = before == maximum ? 1.0f : power_of_two<false>(splat(before - maximum))[0];
  store(sums, load<Floats>(sums) * factor + added);
  return factor;
}

// ------------------------------------------------------------------------------------------------------------ the items

struct Item {
  int64_t sequence, head, token, tokens, key, keys_end;
  int64_t part, parts, stride;  // where it leaves its part of a split context, in floats; parts 1: not split
};

struct Shape {
  int64_t group, tile_tokens, key_words, value_width, part_size;
  Shape(const AttentionCall& call, int64_t elements)
      : group(call.query_heads / call.kv_heads),
        tile_tokens(std::max<int64_t>(1, kTile / group)),
        key_words((call.key_width + elements - 1) / elements),
        value_width(padded(call.value_width, kLanes)),
        part_size(value_width + 2) {}
};

// All items, and the floats that parts of split contexts take.
int64_t plan(const AttentionStep& step, const AttentionCall& call, const Shape& shape, std::vector<Item>& items) {
  int64_t part_floats = 0;
  for (int64_t sequence = 0; sequence < step.sequences; sequence++) {
    const int64_t first = step.query_starts[sequence], end = step.query_starts[sequence + 1];
    const int64_t tiles = (end - first + shape.tile_tokens - 1) / shape.tile_tokens;
    for (int64_t tile = tiles - 1; tile >= 0; tile--) {  // the longest first
      const int64_t token = first + tile * shape.tile_tokens, tokens = std::min(shape.tile_tokens, end - token);
      const int64_t low = *std::min_element(step.begins + token, step.begins + token + tokens) / kKeys * kKeys;
      const int64_t high = *std::max_element(step.ends + token, step.ends + token + tokens);
      const int64_t split = tiles == 1 ? kSplit : high;
      const int64_t first_split = low / split, parts = (high + split - 1) / split - first_split;
      const int64_t part_size = tokens * shape.group * shape.part_size;
      for (int64_t i = 0; i < parts; i++)
        for (int64_t head = 0; head < call.kv_heads; head++)
          items.push_back({sequence, head, token, tokens, std::max(low, (first_split + i) * split),
                           std::min(high, (first_split + i + 1) * split),
                           part_floats + (i * call.kv_heads + head) * part_size, i == 0 ? parts : -parts,
                           call.kv_heads * part_size});
      if (parts > 1) part_floats += parts * call.kv_heads * part_size;
    }
  }
  return part_floats;
}

template <class Query>
void write_output(const AttentionCall& call, const Item& item, const Shape& shape, int64_t row, const float* sums,
                  float divisor) {
  alignas(64) Query rounded_row[kMaxWidth];
  for (int64_t i = 0; i < shape.value_width; i += kLanes)
    narrow(rounded_row + i, load<Floats>(sums + i) * (1.0f / divisor));
  const int64_t token = item.token + row / shape.group, head = item.head * shape.group + row % shape.group;
  std::memcpy((Query*)call.out + (token * call.query_heads + head) * call.value_width, rounded_row,
              call.value_width * sizeof(Query));
}

template <class Word, class Query>
void load_queries(const AttentionStep& step, const AttentionCall& call, const Item& item, const Shape& shape,
                  Scratch& scratch) {
  const int64_t rows = item.tokens * shape.group;
  std::fill_n(scratch.outputs, rows * shape.value_width, 0.0f);
  std::fill_n(scratch.maxima, rows, kLowest);
  std::fill_n(scratch.sums, rows * kLanes, 0.0f);
  for (int64_t row = 0; row < rows; row++) {
    const int64_t token = item.token + row / shape.group, head = item.head * shape.group + row % shape.group;
    scratch.begins[row] = step.begins[token];
    scratch.ends[row] = step.ends[token];
    if (call.sinks && item.parts > 0) {
      scratch.maxima[row] = call.sinks[head] * kLog2E;
      scratch.sums[row * kLanes] = 1;
    }
    const Query* source = (const Query*)call.query + token * call.query_token_stride + head * call.query_head_stride;
    const Rows<Query> one{source, nullptr, 1, 0, call.key_width, 1};
    const float* words = one.template words<Word>(0, scratch.rows);
    std::memcpy(scratch.queries + row * shape.key_words, words, shape.key_words * sizeof(float));
  }
}

void find_slots(const AttentionStep& step, const Item& item, int64_t key, int64_t begin, int64_t* slots) {
  const int64_t* table = step.tables + item.sequence * step.table_width;
  const int64_t keys = item.keys_end - key;
  for (int64_t i = 0; i < kKeys;) {
    const int64_t position = key + i, offset = position % step.block_size;
    const int64_t run = std::min({step.block_size - offset, keys - i, kKeys - i});
    if (run <= 0) {
      slots[i++] = -1;
      continue;
    }
    const int64_t slot = table[position / step.block_size] * step.block_size + offset;
    for (int64_t j = 0; j < run; j++) slots[i + j] = position + j < begin ? -1 : slot + j;
    i += run;
  }
}

template <class Word, class Query, class Stored>
void run_item(const AttentionStep& step, const AttentionCall& call, const Item& item, const Item& next,
              const Shape& shape, float* parts, Scratch& scratch) {
  const int64_t groups_k = (call.key_width + kGroup - 1) / kGroup, groups_v = (call.value_width + kGroup - 1) / kGroup;
  const Rows<Stored> keys{(const Stored*)call.key, (const _Float16*)call.key_scales, call.kv_heads, item.head,
                          call.key_width, groups_k};
  const Rows<Stored> values{(const Stored*)call.value, (const _Float16*)call.value_scales, call.kv_heads, item.head,
                            call.value_width, groups_v};
  const float scale = call.softcap != 0 ? call.scale : call.scale * kLog2E;
  const int64_t rows = item.tokens * shape.group, tiles = (rows + kRows - 1) / kRows;
  load_queries<Word, Query>(step, call, item, shape, scratch);
  const int64_t lowest = *std::min_element(scratch.begins, scratch.begins + rows);
  for (int64_t key = item.key; key < item.keys_end; key += kKeys) {
    const int64_t num_keys = std::min<int64_t>(kKeys, item.keys_end - key), wide = padded(num_keys, kLanes);
    const bool last = key + kKeys >= item.keys_end;
    find_slots(step, item, key, lowest, scratch.slots);
    find_slots(step, last ? next : item, last ? next.key : key + kKeys, 0, scratch.next_slots);
    scratch.next_head = last ? next.head : item.head;
    pack_keys<Word>(keys, wide, scratch);
    pack_values<Word>(values, wide, scratch);
    for (int64_t tile = 0; tile < tiles; tile++) {  // of nearly equal height
      const int64_t row = rows * tile / tiles, height = rows * (tile + 1) / tiles - row;
      product<Word>(height, wide / kLanes, scratch.queries + row * shape.key_words, shape.key_words, scratch.keys,
                    kKeys, shape.key_words, scratch.scores, kKeys, nullptr);
      float factors[kRows];
      for (int64_t r = 0; r < height; r++) {
        for (int64_t i = kKeys * (row + r) / rows; i < kKeys * (row + r + 1) / rows; i++)
          keys.prefetch(scratch.next_slots[i], scratch.next_head);  // a share per row: a burst would stall
        factors[r] = softmax_row<Word>(scratch.scores + r * kKeys, wide, scratch.begins[row + r] - key,
                                       scratch.ends[row + r] - key, scale, call.softcap, scratch.maxima[row + r],
                                       scratch.sums + (row + r) * kLanes);
      }
      product<Word>(height, shape.value_width / kLanes, scratch.scores, kKeys, scratch.values, shape.value_width,
                    wide / Word::kElements, scratch.outputs + row * shape.value_width, shape.value_width, factors);
    }
  }
  for (int64_t row = 0; row < rows; row++) {
    const float* sums = scratch.outputs + row * shape.value_width;
    const float divisor = sum_of(load<Floats>(scratch.sums + row * kLanes));
    if (item.parts == 1) {
      write_output<Query>(call, item, shape, row, sums, divisor);
    } else {
      float* part = parts + item.part + row * shape.part_size;
      std::memcpy(part, sums, shape.value_width * sizeof(float));
      part[shape.value_width] = scratch.maxima[row];
      part[shape.value_width + 1] = divisor;
    }
  }
}

// Adds up the parts of the split context whose first item this is.
template <class Query>
void merge(const AttentionCall& call, const Item& item, const Shape& shape, const float* parts) {
  alignas(64) float sums[kMaxWidth];
  for (int64_t row = 0; row < item.tokens * shape.group; row++) {
    const float* first = parts + item.part + row * shape.part_size + shape.value_width;
    float maximum = kLowest, divisor = 0;
    for (int64_t i = 0; i < item.parts; i++) maximum = std::max(maximum, first[i * item.stride]);
    std::fill_n(sums, shape.value_width, 0.0f);
    for (int64_t i = 0; i < item.parts; i++) {
      const float* part = first + i * item.stride;
      const float factor = power_of_two<false>(splat(part[0] - maximum))[0];
      divisor += factor * part[1];
      for (int64_t j = 0; j < shape.value_width; j += kLanes)
        store(sums + j, load<Floats>(sums + j) + load<Floats>(part - shape.value_width + j) * factor);
    }
    write_output<Query>(call, item, shape, row, sums, divisor);
  }
}

template <class Word, class Query, class Stored>
void attend(const AttentionStep& step, const AttentionCall& call) {
  const Shape shape(call, Word::kElements);
  std::vector<Item> items;
  std::vector<float> parts(plan(step, call, shape, items));
  const int64_t count = items.size();
  int64_t pairs = 0;
  for (const Item& item : items) pairs += (item.keys_end - item.key) * item.tokens * shape.group;
  const int64_t threads = pairs < kSerialPairs ? 1 : std::min(step.threads, count);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    Scratch scratch;
    std::fill_n(scratch.zeros, kMaxWidth, 0.0f);
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < count; i++) {
      const Item& next = items[std::min(i + threads, count - 1)];  // likely this thread's
      run_item<Word, Query, Stored>(step, call, items[i], next, shape, parts.data(), scratch);
    }
    if (!parts.empty()) {
#pragma omp for schedule(dynamic, 1)
      for (int64_t i = 0; i < count; i++)
        if (items[i].parts > 1) merge<Query>(call, items[i], shape, parts.data());
    }
  }
}

// ----------------------------------------------------------------------------------------------------- writing K and V

template <class Given>
void quantise_row(const Given* row, int64_t width, int8_t* codes, _Float16* scales) {
  for (int64_t first = 0; first < width; first += kGroup) {
    alignas(64) float group[kGroup + kLanes] = {};
    alignas(64) int8_t rounded_codes[kGroup + kLanes];
    const int64_t count = std::min<int64_t>(kGroup, width - first);
    alignas(64) Given given[kGroup + kLanes] = {};
    std::memcpy(given, row + first, count * sizeof(Given));
    Floats highest = {};
    for (int64_t i = 0; i < count; i += kLanes) {
      const Floats x = widened(given + i);
      store(group + i, x);
      highest = larger(highest, larger(x, -x));
    }
    const _Float16 scale = (_Float16)(largest(highest) / 127.0f);
    const float divisor = scale == 0 ? 1.0f : (float)scale;
    for (int64_t i = 0; i < count; i += kLanes) {
      const Ints code = nearest(load<Floats>(group + i) / divisor);
      const Ints low = code > 127 ? Ints{} + 127 : code;
      store(rounded_codes + i, __builtin_convertvector(low < -127 ? Ints{} - 127 : low, Bytes));
    }
    std::memcpy(codes + first, rounded_codes, count);
    scales[first / kGroup] = scale;
  }
}

template <class Given>
void write_rows(const WriteCall& call) {
  const int64_t groups = (call.width + kGroup - 1) / kGroup;
#pragma omp parallel for num_threads(call.threads) if (call.tokens * call.heads * call.width > 1 << 16)
  for (int64_t token = 0; token < call.tokens; token++)
    for (int64_t head = 0; head < call.heads; head++) {
      const Given* row = (const Given*)call.rows + token * call.token_stride + head * call.head_stride;
      const int64_t target = call.slots[token] * call.heads + head;
      if (call.scales)
        quantise_row(row, call.width, (int8_t*)call.target + target * call.width,
                     (_Float16*)call.scales + target * groups);
      else
        std::memcpy((Given*)call.target + target * call.width, row, call.width * sizeof(Given));
    }
}

}  // namespace

extern "C" {

// Widths up to 256 and as many query heads per KV head as fit in a tile of 128 rows; the caller checks.
void paged_attention(const AttentionStep* step, const AttentionCall* call) {
#if defined(__AVX512BF16__)
  using Pair = BFloat16Pair;
#else
  using Pair = Float32;
#endif
  if (call->is_bf16)
    call->key_scales ? attend<Pair, BFloat16, int8_t>(*step, *call) : attend<Pair, BFloat16, BFloat16>(*step, *call);
  else
    call->key_scales ? attend<Float32, float, int8_t>(*step, *call) : attend<Float32, float, float>(*step, *call);
}

void write_kv(const WriteCall* key, const WriteCall* value) {
  for (const WriteCall* call : {key, value}) call->is_bf16 ? write_rows<BFloat16>(*call) : write_rows<float>(*call);
}
}
