// Linear layers, gated MLPs and RMS norms for x86 CPUs: plain C interface, no library but OpenMP.
//
// y[m, n] = sum_k x[m, k] * w[n, k] (+ bias[n]). Weights are packed once into panels of kPanel outputs: panel[step][output],
// four bytes an output and step (one float, two bfloat16 or four int8 of the inputs), so all element types share the loops
// below. A register tile is some rows of x times a panel. A panel and a block of rows are one item of work. A thread that
// is free takes the next item, so a thread that loses its core to another process delays no other. The sum of an element
// runs over k in one order for any number of rows or threads: a row's result does not depend on its neighbours.
//
// The same source is compiled for AVX-512 with BF16 and VNNI, for AVX-512, and for AVX2. Callers pass contiguous rows.

#include <cmath>
#include <vector>

#include "common.h"
#include "kernels.h"

namespace {

using kernels::Batch;
using kernels::kSerialWork;

constexpr int64_t kShortChunk = (16 << 10) / kStepBytes;  // steps that stay in the first-level cache over a few tiles
constexpr int64_t kLongChunk = (256 << 10) / kStepBytes;  // steps that stay in the second-level cache over many
constexpr int64_t kStreamAhead = 4 << 10;  // bytes
constexpr int64_t kBlockRows = 192;

constexpr int64_t kSerialElements = 1 << 17;  // of x, in a pass over it that one thread makes as fast as two
constexpr int64_t kMemoryRows = 12;           // as many rows as can be multiplied while a weight arrives from memory

inline int32_t load_word(const void* source) { return load<int32_t>(source); }

inline float as_float(float value) { return value; }
inline float as_float(BFloat16 value) {
  uint32_t bits = (uint32_t)value.bits << 16;
  return load<float>(&bits);
}

// ---------------------------------------------------------------------------------------------- one step of a product

struct Float32 {
  using Accumulator = Floats;
  static constexpr int kInputs = 1, kRows = 6;
  static Floats activation(const char* x) { return Floats{} + load<float>(x); }
  static Floats weight(const char* w) { return load<Floats>(w); }
  static void add(Floats& sum, Floats x, Floats w) { sum += x * w; }
};

struct BFloat16Pairs {
  using Accumulator = Floats;
  static constexpr int kInputs = 2;
#if defined(__AVX512BF16__)
  static constexpr int kRows = 6;
  static Ints activation(const char* x) { return (Ints)_mm512_set1_epi32(load_word(x)); }
  static Ints weight(const char* w) { return load<Ints>(w); }
  static void add(Floats& sum, Ints x, Ints w) {
    sum = (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)w);
  }
#else
  static constexpr int kRows = kVectors == 4 ? 5 : 4;
  struct Pair {
    Floats even, odd;
  };
  static Pair widened(Words bits) { return {(Floats)(bits << 16), (Floats)(bits & 0xffff0000u)}; }
  static Pair activation(const char* x) { return widened(Words{} + (uint32_t)load_word(x)); }
  static Pair weight(const char* w) { return widened(load<Words>(w)); }
  static void add(Floats& sum, Pair x, Pair w) {
    sum += x.even * w.even;
    sum += x.odd * w.odd;
  }
#endif
};

struct Int8Quads {  // x is unsigned with a zero point of 128, w is signed
  using Accumulator = Ints;
  static constexpr int kInputs = 4;
#if defined(__AVX512VNNI__)
  static constexpr int kRows = 6;
  static Ints activation(const char* x) { return (Ints)_mm512_set1_epi32(load_word(x)); }
  static Ints weight(const char* w) { return load<Ints>(w); }
  static void add(Ints& sum, Ints x, Ints w) { sum = (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)x, (__m512i)w); }
#else
  static constexpr int kRows = kVectors == 4 ? 5 : 4;
  struct Pair {  // 16-bit halves: inputs 0 and 2, inputs 1 and 3
    Ints even, odd;
  };
  typedef int16_t Shorts __attribute__((vector_size(kVectorBytes), may_alias));
  static Pair activation(const char* x) {
    Words bits = Words{} + (uint32_t)load_word(x);
    return {(Ints)(bits & 0x00ff00ffu), (Ints)((bits >> 8) & 0x00ff00ffu)};
  }
  static Pair weight(const char* w) {
    Shorts pairs = load<Shorts>(w);
    return {(Ints)((Shorts)(pairs << 8) >> 8), (Ints)(pairs >> 8)};
  }
  static void add(Ints& sum, Pair x, Pair w) { sum += products(x.even, w.even) + products(x.odd, w.odd); }
  static Ints products(Ints x, Ints w) {
#if defined(__AVX512BW__)
    return (Ints)_mm512_madd_epi16((__m512i)x, (__m512i)w);
#else
    return (Ints)_mm256_madd_epi16((__m256i)x, (__m256i)w);
#endif
  }
#endif
};

// -------------------------------------------------------------------------------------------------- what is done after

inline Floats exp_of(Floats x) {  // relative error below 2e-7; x in (-104, 88) or clamped to it
  const Floats zero = {};
  x = x > 88.0f ? zero + 88.0f : x;
  x = x < -87.0f ? zero - 87.0f : x;
  const Floats magic = zero + 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  Floats shifted = x * 1.44269504f + magic;
  Floats n = shifted - magic;
  Floats r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  Words exponent = ((Words)shifted << 23) + 0x3f800000u;
  return p * (Floats)exponent;
}

inline Floats silu(Floats x) { return x / (exp_of(-x) + 1.0f); }

inline Floats dequantised(const Layer&, const Batch&, int64_t, int64_t, Floats sum) { return sum; }
inline Floats dequantised(const Layer& layer, const Batch& batch, int64_t row, int64_t column, Ints sum) {
  Ints product = sum - load<Ints>(layer.sums + column);
  return __builtin_convertvector(product, Floats) * load<Floats>(layer.scales + column) * batch.x_scales[row];
}

// One row of a tile. `column` counts packed outputs. Not inlined: the compiler would fuse its roundings differently in each
// height of a tile, and a row's result would depend on it.
template <class Out, class Accumulator>
__attribute__((noinline)) void finish(const Layer& layer, const Batch& batch, int64_t row, int64_t column,
                                      const Accumulator* sums, Out* y) {
  Floats values[kVectors];
  for (int v = 0; v < kVectors; v++) {
    values[v] = dequantised(layer, batch, row, column + v * kLanes, sums[v]);
    if (layer.bias) values[v] += load<Floats>(layer.bias + column + v * kLanes);
  }
  Out* out = y + row * layer.outputs;
  if (!layer.gated) {
    for (int v = 0; v < kVectors; v++) {
      const int64_t first = column + v * kLanes, count = layer.outputs - first;
      if (batch.residual)
        values[v] = rounded<Out>(values[v]) + load_some((const Out*)batch.residual + row * layer.outputs + first, count);
      store_some(out + first, count, values[v]);
    }
    return;
  }
  for (int v = 0; v < kVectors / 2; v++) {
    Floats gate = rounded<Out>(values[v]), up = rounded<Out>(values[v + kVectors / 2]);
    const int64_t first = column / 2 + v * kLanes;
    store_some(out + first, layer.outputs - first, rounded<Out>(silu(gate)) * up);
  }
}

// --------------------------------------------------------------------------------------------------------- the product

template <class Op>
int64_t steps_of(const Layer& layer) {
  return (layer.inputs + Op::kInputs - 1) / Op::kInputs;
}

struct Chunk {  // steps [begin, end) of a panel's `all`; the weights that are needed next lie `ahead` bytes behind each step
  int64_t begin, end, all, ahead;
};

// The two cache lines of the step `ahead` that tile t asks for: all tiles of an item together fetch the next weights while
// they compute. A tile with nothing to fetch names what it has. A single tile reads weights once: it asks for whole steps
// some way ahead, because the hardware stops at the end of a page (4 and 6 rows: 5 to 15 % faster than without, measured).
struct Prefetch {
  int64_t first = 0, second = 0;
  const bool is_single;
  Prefetch(int64_t t, int64_t tiles, int64_t ahead) : is_single(tiles == 1) {
    const int64_t bytes = tiles < 4 ? 128 : 64;
    if (is_single || t * bytes >= kStepBytes) return;
    first = ahead + t * bytes;
    second = first + bytes - 64;
  }
};

// Rows [row, row + kRows) times a panel. `partial`: [kRows][kPanel], sums between chunks.
template <class Op, int kRows, class Out>
void tile(const Layer& layer, const Batch& batch, int64_t row, int64_t panel, Chunk chunk, Prefetch prefetch,
          typename Op::Accumulator* partial, Out* y) {
  typename Op::Accumulator sums[kRows][kVectors];
  for (int r = 0; r < kRows; r++)
    for (int v = 0; v < kVectors; v++)
      sums[r][v] = chunk.begin ? partial[r * kVectors + v] : typename Op::Accumulator{};
  const char* w = layer.packed + (panel * chunk.all + chunk.begin) * kStepBytes;
  const char* x = batch.x + row * batch.x_bytes + chunk.begin * 4;
  for (int64_t step = chunk.begin; step < chunk.end; step++, w += kStepBytes, x += 4) {
    decltype(Op::weight(w)) weights[kVectors];
    if (prefetch.is_single) {
      for (int64_t line = 0; line < kStepBytes; line += 64) __builtin_prefetch(w + kStreamAhead + line);
    } else {
      __builtin_prefetch(w + prefetch.first, 0, 2);
      __builtin_prefetch(w + prefetch.second, 0, 2);
    }
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; v++) weights[v] = Op::weight(w + v * kVectorBytes);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; r++) {
      auto activation = Op::activation(x + r * batch.x_bytes);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; v++) Op::add(sums[r][v], activation, weights[v]);
    }
  }
  if (chunk.end == chunk.all) {
    for (int r = 0; r < kRows; r++) finish(layer, batch, row + r, panel * kPanel, sums[r], y);
  } else {
    for (int r = 0; r < kRows; r++)
      for (int v = 0; v < kVectors; v++) partial[r * kVectors + v] = sums[r][v];
  }
}

template <class Op, class Out, int kRows = Op::kRows>
inline void tile_of(int64_t rows, const Layer& layer, const Batch& batch, int64_t row, int64_t panel, Chunk chunk,
                    Prefetch prefetch, typename Op::Accumulator* partial, Out* y) {
  if (rows == kRows) return tile<Op, kRows>(layer, batch, row, panel, chunk, prefetch, partial, y);
  if constexpr (kRows > 1) tile_of<Op, Out, kRows - 1>(rows, layer, batch, row, panel, chunk, prefetch, partial, y);
}

// A panel times rows [begin, end), in tiles of nearly equal height. `next`: bytes from this panel to this thread's next.
template <class Op, class Out>
void panel_times_rows(const Layer& layer, const Batch& batch, int64_t panel, int64_t begin, int64_t end, int64_t next,
                      Out* y) {
  alignas(64) typename Op::Accumulator partial[kBlockRows * kPanel / kLanes];
  const int64_t all = steps_of<Op>(layer), tiles = (end - begin + Op::kRows - 1) / Op::kRows;
  const int64_t longest = tiles < 4 ? kShortChunk : kLongChunk, chunks = (all + longest - 1) / longest;
  for (int64_t c = 0; c < chunks; c++) {
    Chunk chunk = {all * c / chunks, all * (c + 1) / chunks, all, 0};
    chunk.ahead = c + 1 < chunks ? (chunk.end - chunk.begin) * kStepBytes : next - chunk.begin * kStepBytes;
    auto* sums = partial;
    for (int64_t t = 0; t < tiles; t++) {
      int64_t row = begin + (end - begin) * t / tiles, rows = begin + (end - begin) * (t + 1) / tiles - row;
      tile_of<Op>(rows, layer, batch, row, panel, chunk, Prefetch(t, tiles, chunk.ahead), sums, y);
      sums += rows * kVectors;
    }
  }
}

int64_t panels_of(const Layer& layer) { return (layer.outputs * (layer.gated ? 2 : 1) + kPanel - 1) / kPanel; }

int64_t items_of(const Layer& layer, int64_t rows) { return panels_of(layer) * ((rows + kBlockRows - 1) / kBlockRows); }

template <class Op>
int64_t work_of(const Layer& layer, int64_t rows) {
  return layer.outputs * (layer.gated ? 2 : 1) * steps_of<Op>(layer) * std::max(rows, kMemoryRows);
}

template <class Op, class Out>
void run_item(const Layer& layer, const Batch& batch, Out* y, int64_t item, int64_t threads) {
  const int64_t panels = panels_of(layer), begin = item / panels * kBlockRows;
  panel_times_rows<Op>(layer, batch, item % panels, begin, std::min(begin + kBlockRows, batch.rows),
                       threads * steps_of<Op>(layer) * kStepBytes, y);
}

template <class Op, class Out>
void multiply(const Layer& layer, const Batch& batch, Out* y, int threads) {
  if (work_of<Op>(layer, batch.rows) < kSerialWork) threads = 1;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
  for (int64_t item = 0; item < items_of(layer, batch.rows); item++) run_item<Op>(layer, batch, y, item, threads);
}

// Rows as they are where a row is whole steps; else copied, with zeros behind each row.
template <class Op, class Element>
void multiply_plain(const Layer& layer, const Element* x, Element* y, int64_t rows, int threads) {
  const int64_t steps = steps_of<Op>(layer);
  if (layer.inputs % Op::kInputs == 0) return multiply<Op>(layer, {(const char*)x, steps * 4, nullptr, rows}, y, threads);
  std::vector<char> padded(rows * steps * 4);
  for (int64_t row = 0; row < rows; row++)
    std::memcpy(&padded[row * steps * 4], x + row * layer.inputs, layer.inputs * sizeof(Element));
  multiply<Op>(layer, {padded.data(), steps * 4, nullptr, rows}, y, threads);
}

typedef uint8_t UnsignedBytes __attribute__((vector_size(kLanes), may_alias));

// x ≈ scale * (byte - 128); returns the scale. Bytes behind `width` stay as they are.
template <class Element>
float quantise_row(const Element* x, uint8_t* bytes, int64_t width) {
  Floats largest = {};
  float peak = 0;
  int64_t k = 0;
  for (; k + kLanes <= width; k += kLanes) {
    Floats value = widened(x + k), size = value < 0.0f ? -value : value;
    largest = size > largest ? size : largest;
  }
  for (int lane = 0; lane < kLanes; lane++) peak = std::max(peak, largest[lane]);
  for (int64_t i = k; i < width; i++) peak = std::max(peak, std::fabs(as_float(x[i])));
  const float scale = peak > 0 ? peak / 127.0f : 1.0f, inverse = 1.0f / scale;
  const float magic = 12582912.0f;
  for (k = 0; k + kLanes <= width; k += kLanes) {
    Floats shifted = widened(x + k) * inverse + (magic + 128.0f);
    store(bytes + k, __builtin_convertvector((Words)shifted & 0xffu, UnsignedBytes));
  }
  for (; k < width; k++) bytes[k] = (uint8_t)(std::nearbyint(as_float(x[k]) * inverse) + 128.0f);
  return scale;
}

template <class Element>
void multiply_quantised(const Layer& layer, const Element* x, Element* y, int64_t rows, int threads) {
  const int64_t x_bytes = (layer.inputs + 3) / 4 * 4;
  static thread_local std::vector<uint8_t> bytes;
  static thread_local std::vector<float> scales;
  bytes.resize(rows * x_bytes);
  scales.resize(rows);
  uint8_t* byte_rows = bytes.data();
  float* row_scales = scales.data();
#pragma omp parallel for schedule(dynamic, 16) num_threads(threads) if (threads > 1 && rows * layer.inputs > kSerialElements)
  for (int64_t row = 0; row < rows; row++)
    row_scales[row] = quantise_row(x + row * layer.inputs, byte_rows + row * x_bytes, layer.inputs);
  multiply<Int8Quads>(layer, {(const char*)byte_rows, x_bytes, row_scales, rows}, y, threads);
}

// ------------------------------------------------------------------------------------------------------------- packing

// The row of weights behind a packed output; of a gated layer `second` says whether it is up's. May be >= outputs.
struct Source {
  int64_t row;
  bool second;
};

inline Source source_of(int64_t column, bool gated) {
  if (!gated) return {column, false};
  int64_t half = kPanel / 2, inside = column % kPanel;
  return {column / kPanel * half + inside % half, inside >= half};
}

// fill(column, row pointer, panel's first byte of that output) for every packed output that has a row; others stay 0.
template <class Element, class Fill>
void for_each_row(const Element* first, const Element* second, int64_t outputs, int64_t inputs, int64_t steps, char* packed,
                  Fill fill) {
  const int64_t panels = (outputs * (second ? 2 : 1) + kPanel - 1) / kPanel;
  std::memset(packed, 0, panels * steps * kStepBytes);
  for (int64_t column = 0; column < panels * kPanel; column++) {
    Source source = source_of(column, second != nullptr);
    if (source.row >= outputs) continue;
    const Element* row = (source.second ? second : first) + source.row * inputs;
    fill(column, row, packed + column / kPanel * steps * kStepBytes + column % kPanel * 4);
  }
}

template <class Op, class Element>
void pack_plain(const Element* first, const Element* second, char* packed, int64_t outputs, int64_t inputs) {
  const int64_t steps = (inputs + Op::kInputs - 1) / Op::kInputs;
  for_each_row(first, second, outputs, inputs, steps, packed, [&](int64_t, const Element* row, char* target) {
    for (int64_t k = 0; k < inputs; k++)
      std::memcpy(target + k / Op::kInputs * kStepBytes + k % Op::kInputs * sizeof(Element), row + k, sizeof(Element));
  });
}

template <class Element>
void pack_quantised(const Element* first, const Element* second, char* packed, float* scales, int32_t* sums,
                    int64_t outputs, int64_t inputs) {
  const int64_t steps = (inputs + 3) / 4;
  std::vector<uint8_t> bytes(inputs);
  for_each_row(first, second, outputs, inputs, steps, packed, [&](int64_t column, const Element* row, char* target) {
    scales[column] = quantise_row(row, bytes.data(), inputs);
    int32_t sum = 0;
    for (int64_t k = 0; k < inputs; k++) {
      int value = (int)bytes[k] - 128;
      sum += value;
      target[k / 4 * kStepBytes + k % 4] = (char)value;
    }
    sums[column] = 128 * sum;
  });
}

// --------------------------------------------------------------------------------------------------------------- norms

// y = weight * Element(x / sqrt(mean(x²) + epsilon))
template <class Element>
void rms_norm_row(const Element* weight, const Element* x, Element* y, int64_t width, float epsilon) {
  Floats squares[4] = {};
  int64_t k = 0;
  for (; k + 4 * kLanes <= width; k += 4 * kLanes)
    for (int v = 0; v < 4; v++) {
      Floats value = widened(x + k + v * kLanes);
      squares[v] += value * value;
    }
  float sum = sum_of((squares[0] + squares[1]) + (squares[2] + squares[3]));
  for (; k < width; k++) sum += as_float(x[k]) * as_float(x[k]);
  const float scale = 1.0f / std::sqrt(sum / (float)width + epsilon);
  for (k = 0; k + kLanes <= width; k += kLanes)
    store_floats(y + k, rounded<Element>(widened(x + k) * scale) * widened(weight + k));
  if (k == width) return;
  Element tail[3][kLanes] = {};
  std::memcpy(tail[0], x + k, (width - k) * sizeof(Element));
  std::memcpy(tail[1], weight + k, (width - k) * sizeof(Element));
  store_floats(tail[2], rounded<Element>(widened(tail[0]) * scale) * widened(tail[1]));
  std::memcpy(y + k, tail[2], (width - k) * sizeof(Element));
}

template <class Element>
void rms_norm(const Element* weight, const Element* x, Element* y, int64_t rows, int64_t width, float epsilon, int threads) {
#pragma omp parallel for schedule(dynamic, 16) num_threads(threads) if (threads > 1 && rows * width > kSerialElements)
  for (int64_t row = 0; row < rows; row++) rms_norm_row(weight, x + row * width, y + row * width, width, epsilon);
}

// Calls run(Op, Element) with what the product's types are.
template <class Run>
auto with_types(const kernels::Product& product, Run run) {
  if (product.layer->scales)
    return product.is_bf16 ? run(Int8Quads{}, BFloat16{}) : run(Int8Quads{}, float{});
  return product.is_bf16 ? run(BFloat16Pairs{}, BFloat16{}) : run(Float32{}, float{});
}

}  // namespace

namespace kernels {

int64_t Product::items() const { return items_of(*layer, batch.rows); }

int64_t Product::work() const {
  return with_types(*this, [&](auto op, auto) { return work_of<decltype(op)>(*layer, batch.rows); });
}

void Product::run(int64_t item, int64_t threads) const {
  with_types(*this, [&](auto op, auto element) {
    run_item<decltype(op)>(*layer, batch, (decltype(element)*)y, item, threads);
  });
}

const char* Product::weights(int64_t item, int64_t* bytes) const {
  *bytes = kStepBytes * with_types(*this, [&](auto op, auto) { return steps_of<decltype(op)>(*layer); });
  return layer->packed + item % panels_of(*layer) * *bytes;
}

void rms_norm_rows(bool is_bf16, const void* weight, const void* x, void* y, int64_t rows, int64_t width,
                   float epsilon) {
  if (is_bf16)
    rms_norm((const BFloat16*)weight, (const BFloat16*)x, (BFloat16*)y, rows, width, epsilon, 1);
  else
    rms_norm((const float*)weight, (const float*)x, (float*)y, rows, width, epsilon, 1);
}

void quantise_rows(bool is_bf16, const void* x, uint8_t* bytes, float* scales, int64_t rows, int64_t width,
                   int64_t x_bytes) {
  for (int64_t row = 0; row < rows; row++, bytes += x_bytes)
    scales[row] = is_bf16 ? quantise_row((const BFloat16*)x + row * width, bytes, width)
                          : quantise_row((const float*)x + row * width, bytes, width);
}

}  // namespace kernels

extern "C" {

void linear_f32(const Layer* layer, const float* x, float* y, int64_t rows, int threads) {
  multiply_plain<Float32>(*layer, x, y, rows, threads);
}
void linear_bf16(const Layer* layer, const BFloat16* x, BFloat16* y, int64_t rows, int threads) {
  multiply_plain<BFloat16Pairs>(*layer, x, y, rows, threads);
}
void linear_i8_f32(const Layer* layer, const float* x, float* y, int64_t rows, int threads) {
  multiply_quantised(*layer, x, y, rows, threads);
}
void linear_i8_bf16(const Layer* layer, const BFloat16* x, BFloat16* y, int64_t rows, int threads) {
  multiply_quantised(*layer, x, y, rows, threads);
}

void rms_norm_f32(const float* weight, const float* x, float* y, int64_t rows, int64_t width, float epsilon,
                  int threads) {
  rms_norm(weight, x, y, rows, width, epsilon, threads);
}
void rms_norm_bf16(const BFloat16* weight, const BFloat16* x, BFloat16* y, int64_t rows, int64_t width, float epsilon,
                  int threads) {
  rms_norm(weight, x, y, rows, width, epsilon, threads);
}
}
