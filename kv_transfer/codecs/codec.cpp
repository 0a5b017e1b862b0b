// KV on its way between workers: groups of 64 tokens to 8 or 4 bit codes and back.
//
// A group's rows lie in 64 / block_size blocks. K has a scale per channel over the group, V one per token and run of
// channels. Rows are walked in the order they lie in, twice, the second time from the cache: for K a tile of channels at
// a time, for V a few tokens. A byte of 4 bit codes holds tokens t (low half) and t + 32, so that a row of bytes unpacks
// into two rows without a shuffle. `quantisation.py` says what the numbers are and holds the same arithmetic in torch.
//
// Plain C interface, mirrored by native.py; no state. Compiled for AVX-512 with BF16, for AVX-512, and for AVX2 with FMA and F16C.

#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // of gcc's own AVX-512 headers, up to 12

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

extern "C" {
struct CodecPlane {  // the K or the V of one layer
  void *rows, *codes, *scales;  // of block 0
  int64_t heads, width;
  int64_t run;  // 0: a scale per channel of the group; else channels of a token's head that share one
};

struct CodecCall {
  const CodecPlane* planes;
  const int64_t* blocks;       // [groups, 64 / block_size]
  const int64_t* wire_blocks;  // [groups]
  int64_t num_planes, num_groups, block_size;
  int64_t type;  // of rows: 0 float32, 1 bfloat16, 2 float16
  int64_t bits;  // of a code: 8 or 4
};
}

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#else
constexpr int kLanes = 8;
#endif
constexpr int kTokens = 64;     // of a group
constexpr int kTile = 1024;      // channels whose scales are held at a time
// Bytes of the longest rows that are asked for a group ahead, to be written and to be read. Short rows gain up to 2x, as the
// blocks of a group lie apart; for long ones the hardware's own fetching is enough.
constexpr uint64_t kFetchedRow[] = {1024, 2048};
constexpr int kInfinity = 0x7f800000;
constexpr float kMaxHalf = 65504.0f;

typedef float Floats __attribute__((vector_size(kLanes * 4), may_alias));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4), may_alias));
typedef uint32_t Words __attribute__((vector_size(kLanes * 4), may_alias));
typedef uint16_t Halves __attribute__((vector_size(kLanes * 2), may_alias));
typedef int16_t Shorts __attribute__((vector_size(kLanes * 4), may_alias));
typedef int8_t Bytes __attribute__((vector_size(kLanes), may_alias));
struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

template <class Vector>
inline Vector load(const void* source) {
  Vector value;
  std::memcpy(&value, source, sizeof(value));
  return value;
}

#if defined(__AVX512F__)
inline Words words_of(Halves value) { return (Words)_mm512_cvtepu16_epi32((__m256i)value); }
inline Ints words_of(Bytes value) { return (Ints)_mm512_cvtepi8_epi32((__m128i)value); }
inline Floats floats_of(Halves value) { return (Floats)_mm512_cvtph_ps((__m256i)value); }
inline Halves halves_of(Floats value) { return (Halves)_mm512_cvtps_ph((__m512)value, _MM_FROUND_TO_NEAREST_INT); }
inline Bytes bytes_of(Ints value) { return (Bytes)_mm512_cvtepi32_epi8((__m512i)value); }
inline Ints nearest(Floats value) { return (Ints)_mm512_cvtps_epi32((__m512)value); }  // NaN: the lowest integer
inline Floats smaller(Floats a, Floats b) { return (Floats)_mm512_min_ps((__m512)a, (__m512)b); }  // b where one is NaN
inline Floats larger(Floats a, Floats b) { return (Floats)_mm512_max_ps((__m512)a, (__m512)b); }
inline Ints larger(Ints a, Ints b) { return (Ints)_mm512_max_epi32((__m512i)a, (__m512i)b); }
inline Shorts larger(Shorts a, Shorts b) { return (Shorts)_mm512_max_epi16((__m512i)a, (__m512i)b); }
inline __m256i halved(Ints value) {
  return _mm256_max_epi32(_mm512_castsi512_si256((__m512i)value), _mm512_extracti64x4_epi64((__m512i)value, 1));
}
inline __m256i halved(Shorts value) {
  return _mm256_max_epi16(_mm512_castsi512_si256((__m512i)value), _mm512_extracti64x4_epi64((__m512i)value, 1));
}
#else
inline Words words_of(Halves value) { return (Words)_mm256_cvtepu16_epi32((__m128i)value); }
inline Ints words_of(Bytes value) { return (Ints)_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(load<int64_t>(&value))); }
inline Floats floats_of(Halves value) { return (Floats)_mm256_cvtph_ps((__m128i)value); }
inline Halves halves_of(Floats value) { return (Halves)_mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT); }
inline Bytes bytes_of(Ints value) {
  const __m256i picked = _mm256_shuffle_epi8((__m256i)value, _mm256_set1_epi32(0x0c080400));
  const int64_t low = _mm256_extract_epi32(picked, 0), high = _mm256_extract_epi32(picked, 4);
  const int64_t joined = (low & 0xffffffff) | high << 32;
  return load<Bytes>(&joined);
}
inline Ints nearest(Floats value) { return (Ints)_mm256_cvtps_epi32((__m256)value); }  // NaN: the lowest integer
inline Floats smaller(Floats a, Floats b) { return (Floats)_mm256_min_ps((__m256)a, (__m256)b); }  // b where one is NaN
inline Floats larger(Floats a, Floats b) { return (Floats)_mm256_max_ps((__m256)a, (__m256)b); }
inline Ints larger(Ints a, Ints b) { return (Ints)_mm256_max_epi32((__m256i)a, (__m256i)b); }
inline Shorts larger(Shorts a, Shorts b) { return (Shorts)_mm256_max_epi16((__m256i)a, (__m256i)b); }
inline __m256i halved(Ints value) { return (__m256i)value; }
inline __m256i halved(Shorts value) { return (__m256i)value; }
#endif
inline int32_t largest_of(Ints value) {
  const __m256i both = halved(value);
  __m128i most = _mm_max_epi32(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
  most = _mm_max_epi32(most, _mm_shuffle_epi32(most, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(most, _mm_shuffle_epi32(most, 0xb1)));
}
inline int16_t largest_of(Shorts value) {  // of numbers that are not negative
  const __m256i both = halved(value);
  const __m128i most = _mm_max_epi16(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
  return ~_mm_extract_epi16(_mm_minpos_epu16(~most), 0);
}
inline Floats splat(float value) { return value - Floats{}; }  // a sum would change -0

inline Floats widened(Floats value, const float*) { return value; }
inline Floats widened(Halves value, const BFloat16*) { return (Floats)(words_of(value) << 16); }
inline Floats widened(Halves value, const Float16*) { return floats_of(value); }
inline Floats narrowed(Floats value, const float*) { return value; }
inline Halves narrowed(Floats value, const BFloat16*) {  // the only NaN has no payload and stays one
#if defined(__AVX512BF16__)
  return (Halves)_mm512_cvtneps_pbh((__m512)value);
#else
  const Words bits = (Words)value;
  return __builtin_convertvector((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16, Halves);
#endif
}
inline Halves narrowed(Floats value, const Float16*) {
  return halves_of(smaller(splat(kMaxHalf), larger(splat(-kMaxHalf), value)));
}

// How a loop's body reads and writes a whole vector, or the first elements of one.
struct Whole {
  template <class Vector>
  Vector read(const void* source) const {
    return load<Vector>(source);
  }
  template <class Vector>
  void write(void* target, Vector value) const {
    std::memcpy(target, &value, sizeof(value));
  }
};
template <int kCount>
struct Part {
  int64_t count;  // of kCount
  template <class Vector>
  Vector read(const void* source) const {
    const int64_t bytes = sizeof(Vector) / kCount * count;
#if defined(__AVX512F__)
    const uint64_t mask = _bzhi_u64(~0ull, bytes);
    if constexpr (sizeof(Vector) == 64) return (Vector)_mm512_maskz_loadu_epi8(mask, source);
    else if constexpr (sizeof(Vector) == 32) return (Vector)_mm256_maskz_loadu_epi8(mask, source);
    else return (Vector)_mm_maskz_loadu_epi8(mask, source);
#else
    Vector value{};
    std::memcpy(&value, source, bytes);
    return value;
#endif
  }
  template <class Vector>
  void write(void* target, Vector value) const {
    const int64_t bytes = sizeof(Vector) / kCount * count;
#if defined(__AVX512F__)
    const uint64_t mask = _bzhi_u64(~0ull, bytes);
    if constexpr (sizeof(Vector) == 64) _mm512_mask_storeu_epi8(target, mask, (__m512i)value);
    else if constexpr (sizeof(Vector) == 32) _mm256_mask_storeu_epi8(target, mask, (__m256i)value);
    else _mm_mask_storeu_epi8(target, mask, (__m128i)value);
#else
    std::memcpy(target, &value, bytes);
#endif
  }
};
template <int kCount = kLanes, class Body>
inline void each_vector(int64_t count, Body body) {
  int64_t i = 0;
  for (; i + kCount <= count; i += kCount) body(i, Whole{});
  if (i < count) body(i, Part<kCount>{count - i});
}

template <class Element>
using Packed = decltype(narrowed(Floats{}, (const Element*)nullptr));
template <class Element, class Span>
inline Floats read(const Element* source, Span span) {
  return widened(span.template read<Packed<Element>>(source), source);
}
template <class Element, class Span>
inline void write(Element* target, Floats value, Span span) {
  span.write(target, narrowed(value, target));
}

// The bits of |x| order as the numbers do, a NaN above infinity.
inline Ints magnitudes(Ints bits) { return bits & 0x7fffffff; }
inline Shorts magnitudes(Shorts bits) { return bits & 0x7fff; }
inline Ints magnitudes(const float*) { return Ints{}; }
template <class Element>
inline Shorts magnitudes(const Element*) { return Shorts{}; }
template <class Element>
using Magnitudes = decltype(magnitudes((const Element*)nullptr));
template <class Element>
constexpr int kMagnitudes = sizeof(Magnitudes<Element>) / sizeof(Element);

// From the largest magnitudes, the stored scales and what to multiply by to get codes.
template <int kBits, class Element>
inline void make_scales(const Element* largest, int64_t count, uint16_t* scales, float* inverses) {
  constexpr float kMaxCode = (1 << (kBits - 1)) - 1;
  each_vector(count, [&](int64_t i, auto span) {
    const Ints bits = (Ints)read(largest + i, Whole{});
    const Ints finite = bits < kInfinity;
    const Halves half = halves_of(smaller(splat(kMaxHalf), (Floats)(bits & finite) / kMaxCode));
    const Floats scale = floats_of(half);
    const Floats inverse = (Floats)((Ints)(1.0f / scale) & (Ints)(scale > 0.0f) & finite);
    std::memcpy(inverses + i, &inverse, sizeof(inverse));
    const Halves poison = __builtin_convertvector((Words)~finite, Halves) & 0x7e00;
    span.write(scales + i, (Halves)(half | poison));
  });
}

template <int kBits>
inline Ints code_of(Floats value, Floats inverse) {
  constexpr float kMaxCode = (1 << (kBits - 1)) - 1;
  return nearest(smaller(splat(kMaxCode), larger(splat(-kMaxCode), value * inverse)));
}

// One row of codes from one row of numbers, or from two.
template <int kBits, class Span, class Element>
inline void write_codes(const Element* const* pair, int64_t i, const Floats* inverses, uint8_t* codes, Span span) {
  Ints code = code_of<kBits>(read(pair[0] + i, span), inverses[0]);
  if constexpr (kBits == 4) {
    code = (code & 15) | code_of<4>(read(pair[1] + i, span), inverses[1]) << 4;
  }
  span.write(codes + i, bytes_of(code));
}

template <int kBits, class Span, class Element>
inline void read_codes(const uint8_t* codes, int64_t i, const Floats* scales, Element* const* pair, Span span) {
  const Ints code = words_of(span.template read<Bytes>(codes + i));
  if constexpr (kBits == 8) {
    write(pair[0] + i, __builtin_convertvector(code, Floats) * scales[0], span);
  } else {
    write(pair[0] + i, __builtin_convertvector(code << 28 >> 28, Floats) * scales[0], span);
    write(pair[1] + i, __builtin_convertvector(code >> 4, Floats) * scales[1], span);
  }
}

template <class Element>
inline void read_pair(Element* const* rows, int64_t row, int64_t start, Element** pair) {
  pair[0] = rows[row] + start;
  pair[1] = rows[(row + kTokens / 2) % kTokens] + start;
}

// Asks for the same rows of the next group, which lie anywhere: rows[kTokens..] are its rows, or null.
template <int kBits, class Element>
inline void fetch_ahead(Element* const* rows, int64_t row, int64_t channels) {
  for (int64_t token = row; token < kTokens; token += kTokens * kBits / 8) {
    const char* next = (const char*)rows[kTokens + token];
    if (next == nullptr) return;
    for (int64_t i = 0; i < channels * (int64_t)sizeof(Element); i += 64) __builtin_prefetch(next + i, 0, 2);
  }
}

// ---------------------------------------------------------------------------------------------- K: a scale per channel

template <class Element>
inline void find_largest(Element* const* rows, int64_t start, int64_t count, Element* largest) {
  constexpr int kAtOnce = 8;  // rows
  using Vector = Magnitudes<Element>;
  std::memset((void*)largest, 0, sizeof(Element) * kTile);
  for (int row = 0; row < kTokens; row += kAtOnce) {
    each_vector<kMagnitudes<Element>>(count, [&](int64_t i, auto span) {
      Vector most = load<Vector>(largest + i);
      for (int j = 0; j < kAtOnce; j++) {
        most = larger(most, magnitudes(span.template read<Vector>(rows[row + j] + start + i)));
      }
      std::memcpy((void*)(largest + i), &most, sizeof(most));
    });
  }
}

template <class Element, int kBits>
void encode_channels(Element* const* rows, int64_t channels, uint8_t* codes, uint16_t* scales) {
  alignas(64) Element largest[kTile];
  alignas(64) float inverses[kTile];
  for (int64_t start = 0; start < channels; start += kTile) {
    const int64_t count = std::min<int64_t>(kTile, channels - start);
    find_largest(rows, start, count, largest);
    make_scales<kBits>(largest, count, scales + start, inverses);
    for (int64_t row = 0; row < kTokens * kBits / 8; row++) {
      Element* pair[2];
      read_pair(rows, row, start, pair);
      fetch_ahead<kBits>(rows, row, count);
      each_vector(count, [&](int64_t i, auto span) {
        const Floats inverse = load<Floats>(inverses + i), both[2] = {inverse, inverse};
        write_codes<kBits>(pair, i, both, codes + row * channels + start, span);
      });
    }
  }
}

inline void widen_scales(const uint16_t* scales, int64_t count, float* wide) {
  each_vector(count, [&](int64_t i, auto span) {
    span.write(wide + i, floats_of(span.template read<Halves>(scales + i)));
  });
}

template <class Element, int kBits>
void decode_channels(Element* const* rows, int64_t channels, const uint8_t* codes, const uint16_t* scales) {
  alignas(64) float wide[kTile];
  for (int64_t start = 0; start < channels; start += kTile) {
    const int64_t count = std::min<int64_t>(kTile, channels - start);
    widen_scales(scales + start, count, wide);
    for (int64_t row = 0; row < kTokens * kBits / 8; row++) {
      Element* pair[2];
      read_pair(rows, row, start, pair);
      fetch_ahead<kBits>(rows, row, count);
      each_vector(count, [&](int64_t i, auto span) {
        const Floats scale = span.template read<Floats>(wide + i), both[2] = {scale, scale};
        read_codes<kBits>(codes + row * channels + start, i, both, pair, span);
      });
    }
  }
}

// ------------------------------------------------------------------------- V: a scale per token and run of channels

// Calls body(first channel, channels, index of its scale) for each run of the heads [first, last).
template <class Body>
inline void each_run(int64_t first, int64_t last, int64_t width, int64_t run, Body body) {
  int64_t index = 0;
  for (int64_t head = first; head < last; head++) {
    for (int64_t channel = 0; channel < width; channel += run) {
      body(head * width + channel, std::min(run, width - channel), index++);
    }
  }
}

// Rows of codes and heads whose scales are made together: they lie in one piece, so either is all there are or rows is 1.
struct RunTile {
  static constexpr int64_t kRows = 16;
  int64_t runs, rows, heads;

  explicit RunTile(const CodecPlane& plane) {
    runs = (plane.width + plane.run - 1) / plane.run;
    rows = std::clamp<int64_t>(kTile / (plane.heads * runs), 1, kRows);
    heads = std::clamp<int64_t>(kTile / runs, 1, plane.heads);
  }
};

// Calls body(first row of codes, rows, first head, end of heads).
template <int kBits, class Body>
inline void each_run_tile(const CodecPlane& plane, const RunTile& tile, Body body) {
  constexpr int64_t kRows = kTokens * kBits / 8;
  for (int64_t row = 0; row < kRows; row += tile.rows) {
    for (int64_t head = 0; head < plane.heads; head += tile.heads) {
      body(row, std::min(tile.rows, kRows - row), head, std::min(plane.heads, head + tile.heads));
    }
  }
}

template <class Element, int kBits>
void encode_runs(Element* const* rows, const CodecPlane& plane, uint8_t* codes, uint16_t* scales) {
  constexpr int kHalves = 8 / kBits;  // tokens in a row of codes
  const RunTile tile(plane);
  alignas(64) Element largest[kTile];
  alignas(64) float inverses[2][kTile];
  each_run_tile<kBits>(plane, tile, [&](int64_t start, int64_t count, int64_t head, int64_t end) {
    const int64_t per_row = (end - head) * tile.runs;
    for (int half = 0; half < kHalves; half++) {
      const int64_t token = start + half * (kTokens / 2);
      for (int64_t row = 0; row < count; row++) {
        each_run(head, end, plane.width, plane.run, [&](int64_t first, int64_t channels, int64_t index) {
          Magnitudes<Element> most{};
          each_vector<kMagnitudes<Element>>(channels, [&](int64_t i, auto span) {
            most = larger(most, magnitudes(span.template read<Magnitudes<Element>>(rows[token + row] + first + i)));
          });
          const auto bits = largest_of(most);
          std::memcpy((void*)(largest + row * per_row + index), &bits, sizeof(bits));
        });
      }
      make_scales<kBits>(largest, count * per_row, scales + (token * plane.heads + head) * tile.runs, inverses[half]);
    }
    for (int64_t row = 0; row < count; row++) {
      Element* pair[2];
      read_pair(rows, start + row, 0, pair);
      fetch_ahead<kBits>(rows, start + row, plane.heads * plane.width);
      each_run(head, end, plane.width, plane.run, [&](int64_t first, int64_t channels, int64_t index) {
        const int64_t place = row * per_row + index;
        const Floats both[2] = {splat(inverses[0][place]), splat(inverses[kHalves - 1][place])};
        each_vector(channels, [&](int64_t i, auto span) {
          write_codes<kBits>(pair, first + i, both, codes + (start + row) * plane.heads * plane.width, span);
        });
      });
    }
  });
}

template <class Element, int kBits>
void decode_runs(Element* const* rows, const CodecPlane& plane, const uint8_t* codes, const uint16_t* scales) {
  constexpr int kHalves = 8 / kBits;
  const RunTile tile(plane);
  alignas(64) float wide[2][kTile];
  each_run_tile<kBits>(plane, tile, [&](int64_t start, int64_t count, int64_t head, int64_t end) {
    const int64_t per_row = (end - head) * tile.runs;
    for (int half = 0; half < kHalves; half++) {
      const int64_t token = start + half * (kTokens / 2);
      widen_scales(scales + (token * plane.heads + head) * tile.runs, count * per_row, wide[half]);
    }
    for (int64_t row = 0; row < count; row++) {
      Element* pair[2];
      read_pair(rows, start + row, 0, pair);
      fetch_ahead<kBits>(rows, start + row, plane.heads * plane.width);
      each_run(head, end, plane.width, plane.run, [&](int64_t first, int64_t channels, int64_t index) {
        const int64_t place = row * per_row + index;
        const Floats both[2] = {splat(wide[0][place]), splat(wide[kHalves - 1][place])};
        each_vector(channels, [&](int64_t i, auto span) {
          read_codes<kBits>(codes + (start + row) * plane.heads * plane.width, first + i, both, pair, span);
        });
      });
    }
  });
}

// --------------------------------------------------------------------------------------------------------- the calls

template <class Element, int kBits, bool kEncode>
void code_group(const CodecCall& call, const CodecPlane& plane, int64_t group) {
  const int64_t channels = plane.heads * plane.width;
  Element* rows[2 * kTokens] = {};
  const bool fetches = group + 1 < call.num_groups && channels * sizeof(Element) <= kFetchedRow[kEncode];
  const int64_t* blocks = call.blocks + group * (kTokens / call.block_size);
  for (int64_t token = 0; token < (fetches ? 2 : 1) * kTokens; token++) {
    const int64_t slot = blocks[token / call.block_size] * call.block_size + token % call.block_size;
    rows[token] = (Element*)plane.rows + slot * channels;
  }
  const int64_t wire_block = call.wire_blocks[group];
  uint8_t* codes = (uint8_t*)plane.codes + wire_block * (kTokens * kBits / 8) * channels;
  uint16_t* scales = (uint16_t*)plane.scales;
  if (plane.run == 0) {
    scales += wire_block * channels;
    if constexpr (kEncode) encode_channels<Element, kBits>(rows, channels, codes, scales);
    else decode_channels<Element, kBits>(rows, channels, codes, scales);
  } else {
    scales += wire_block * kTokens * plane.heads * ((plane.width + plane.run - 1) / plane.run);
    if constexpr (kEncode) encode_runs<Element, kBits>(rows, plane, codes, scales);
    else decode_runs<Element, kBits>(rows, plane, codes, scales);
  }
}

template <class Element, int kBits, bool kEncode>
void code_all(const CodecCall& call) {
  for (int64_t plane = 0; plane < call.num_planes; plane++) {
    for (int64_t group = 0; group < call.num_groups; group++) {
      code_group<Element, kBits, kEncode>(call, call.planes[plane], group);
    }
  }
}

template <bool kEncode>
void dispatch(const CodecCall& call) {
  const bool eight = call.bits == 8;
  switch (call.type) {
    case 0: return eight ? code_all<float, 8, kEncode>(call) : code_all<float, 4, kEncode>(call);
    case 1: return eight ? code_all<BFloat16, 8, kEncode>(call) : code_all<BFloat16, 4, kEncode>(call);
    case 2: return eight ? code_all<Float16, 8, kEncode>(call) : code_all<Float16, 4, kEncode>(call);
  }
}

}  // namespace

extern "C" {

void codec_encode(const CodecCall* call) { dispatch<true>(*call); }
void codec_decode(const CodecCall* call) { dispatch<false>(*call); }
}
