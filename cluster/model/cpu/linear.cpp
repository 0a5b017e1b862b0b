// Linear layers and gated MLPs for x86 CPUs: plain C interface, no library but OpenMP.
//
// y[m, n] = sum_k x[m, k] * w[n, k] (+ bias[n]). Weights are packed once into panels of kPanel outputs: panel[step][output],
// four bytes an output and step (one float, two bfloat16 or four int8 of the inputs), so all element types share the loops
// below. A register tile (product_tiles.h) is some rows of x times a panel. Some panels and a block of rows are one item of
// work. A thread that is free takes the next item, so a thread that loses its core to another process delays no other. The
// sum of an element runs over k in one order for any number of rows or threads: a row's result does not depend on its
// neighbours.
//
// The same source is compiled for AMX, for AVX-512 with BF16 and VNNI, for AVX-512, and for AVX2. Callers pass contiguous rows.

#include <type_traits>
#include <vector>

#include "common.h"
#include "kernels.h"
#include "product_tiles.h"

namespace {

using kernels::Batch;
using kernels::kSerialElements;
using kernels::kSerialWork;

constexpr int64_t kShortChunk = (16 << 10) / kStepBytes;  // steps that stay in the first-level cache over a few tiles
constexpr int64_t kLongChunk = (256 << 10) / kStepBytes;  // steps that stay in the second-level cache over many
constexpr int64_t kPreparedWords = 48 << 10;             // of a block of rows and a chunk of steps: 192 KiB
constexpr int64_t kMemoryRows = 12;  // as many rows as can be multiplied while a weight arrives from memory

// -------------------------------------------------------------------------------------------------- what is done after

inline Floats dequantised(const Layer&, const Batch&, int64_t, int64_t, Floats sum) { return sum; }
inline Floats dequantised(const Layer& layer, const Batch& batch, int64_t row, int64_t column, Ints sum) {
  Ints product = sum - load<Ints>(layer.sums + column);
  return __builtin_convertvector(product, Floats) * load<Floats>(layer.scales + column) * batch.x_scales[row];
}

int64_t ceil_div(int64_t n, int64_t divisor) { return (n + divisor - 1) / divisor; }

int64_t panels_of(const Layer& layer) { return ceil_div(layer.outputs * (layer.gated ? 2 : 1), kPanel); }

// What adapters are made of next to rows of this type.
template <class Out>
using AdapterOp = std::conditional_t<sizeof(Out) == 2, BFloat16Pairs, Float32>;

template <class Op, int kParts, int kPass>
__attribute__((always_inline)) inline void add_step(Floats* sums, const char* const* down, const char* up) {
  typename Op::Operand activations[kParts];
#pragma GCC unroll 4
  for (int part = 0; part < kParts; part++) {
    const Floats word = splat_word(down[part]);
    if constexpr (Op::kPasses == 1)
      activations[part] = (typename Op::Operand)word;
    else
      activations[part] = Op::template widened_half<kPass>((Words)word);
  }
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; v++)
    Op::add(sums[v], activations[v * kParts / kVectors], Op::template weight<kPass>(up + v * kVectorBytes));
}

// A panel of B times what A has made of kParts parts: each has as many of the panel's vectors. Asks for the next panel, which
// arrives while that panel's weights are multiplied.
template <class Op, int kParts>
__attribute__((always_inline)) inline void add_panel(const char* const* parts, const char* up, int64_t steps, Floats* values) {
  Floats even[kVectors], odd[kVectors];  // two chains of additions do not wait for each other
  const char* down[kParts];
  std::copy(parts, parts + kParts, down);
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; v++) even[v] = odd[v] = Floats{};
  for (int64_t step = 0; step < steps; step += 2, up += kStepBytes) {
    for (int64_t line = 0; line < 2 * kStepBytes; line += 64) __builtin_prefetch(up + steps * kStepBytes + line, 0, 2);
    add_step<Op, kParts, 0>(even, down, up);
    if constexpr (Op::kPasses == 2) add_step<Op, kParts, 1>(even, down, up);
    for (int part = 0; part < kParts; part++) down[part] += 4;
    up += kStepBytes;
    add_step<Op, kParts, 0>(odd, down, up);
    if constexpr (Op::kPasses == 2) add_step<Op, kParts, 1>(odd, down, up);
    for (int part = 0; part < kParts; part++) down[part] += 4;
  }
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; v++) values[v] += even[v] + odd[v];
}

// The row's adapter, if it has one, to a panel of its outputs.
template <class Out>
inline void add_adapter(const Layer& layer, const Batch& batch, int64_t row, int64_t column, Floats* values) {
  using Op = AdapterOp<Out>;
  const int32_t number = batch.adapters.numbers[row];
  if (!number || !layer.adapters[number - 1].down) return;
  const LayerAdapter& adapter = layer.adapters[number - 1];
  const int64_t steps = adapter.rank / Op::kInputs;
  const char *up = (const char*)adapter.up + column / kPanel * steps * kStepBytes, *down[kVectors];
  const Out* first = (const Out*)batch.adapters.down + row * layer.down_width;
  if (layer.gated) {
    down[0] = (const char*)first, down[1] = (const char*)(first + adapter.rank);
    return add_panel<Op, 2>(down, up, steps, values);
  }
  for (int v = 0; v < kVectors; v++) {
    const int64_t output = column + v * kLanes;
    down[v] = (const char*)(first + ((output >= layer.second) + (output >= layer.third)) * adapter.rank);
  }
  if (down[0] == down[kVectors - 1]) return add_panel<Op, 1>(down, up, steps, values);
  add_panel<Op, kVectors>(down, up, steps, values);
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
  if (batch.adapters.numbers) add_adapter<Out>(layer, batch, row, column, values);
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
  return ceil_div(layer.inputs, Op::kInputs);
}

// Steps [begin, end) of `all`.
struct Chunk {
  int64_t begin, end, all;
  int64_t steps() const { return end - begin; }
};

// Rows [begin, begin + rows) of x in these steps, as a tile reads them.
template <class Op>
Operands operands_of(const Batch& batch, int64_t begin, int64_t rows, Chunk chunk) {
  const char* x = batch.x + begin * batch.x_bytes + chunk.begin * 4;
  Operands operands{x, nullptr, batch.x_bytes, chunk.steps(), chunk.begin == 0};
  if constexpr (Op::kIsPrepared) {
    alignas(64) static thread_local char prepared[(kPreparedWords + Op::Tiles::kBlockRows * kLanes) * 4];
    operands.x = prepared;
    operands.x_bytes = (chunk.steps() * Op::kPasses + kLanes) * 4;  // rows of 2^n bytes would share cache sets
    for (int64_t row = 0; row < rows; row++)
      Op::prepare(x + row * batch.x_bytes, prepared + row * operands.x_bytes, chunk.steps());
  }
  return operands;
}

// Chunks of a product of `rows` rows, nearly equal in steps.
template <class Op>
int64_t chunks_of(int64_t all, int64_t rows, int64_t tiles) {
  int64_t longest = tiles == 1 ? all : tiles < 4 ? kShortChunk : kLongChunk;
  if (Op::Tiles::kDepth > 1 && rows > 16) longest = kShortChunk;  // what the matrix unit reads again and again
  if (Op::kIsPrepared) longest = std::min(longest, kPreparedWords / (rows * Op::kPasses));
  return std::max<int64_t>(1, ceil_div(all, longest));
}

template <class Op>
Chunk chunk_of(int64_t all, int64_t c, int64_t chunks) {
  const auto begin = [&](int64_t i) { return i == chunks ? all : all * i / chunks / Op::Tiles::kDepth * Op::Tiles::kDepth; };
  return {begin(c), begin(c + 1), all};
}

// Panels [panel, panel + panels) times rows [begin, begin + rows), in tiles. `next`: bytes from this panel to this
// thread's next.
template <class Op, class Out>
void panels_times_rows(const Layer& layer, const Batch& batch, int64_t panel, int64_t panels, int64_t begin, int64_t rows,
                       int64_t next, Out* y) {
  using Tiles = typename Op::Tiles;
  alignas(64) typename Op::Accumulator kept[Tiles::kPanels][Tiles::kBlockRows * kVectors];
  const int64_t all = steps_of<Op>(layer), tiles = ceil_div(rows, Tiles::kTileRows);
  const int64_t chunks = chunks_of<Op>(all, rows, tiles);
  Tiles multiplier;
  for (int64_t c = 0; c < chunks; c++) {
    const Chunk chunk = chunk_of<Op>(all, c, chunks);
    Operands operands = operands_of<Op>(batch, begin, rows, chunk);
    const char* x = operands.x;
    for (int64_t p = 0; p < panels; p++) {
      operands.weights = layer.packed + ((panel + p) * all + chunk.begin) * kStepBytes;
      const int64_t ahead = p + 1 < panels   ? all * kStepBytes
                            : c + 1 < chunks ? (chunk.steps() - p * all) * kStepBytes
                                             : next - (chunk.begin + p * all) * kStepBytes;
      for (int64_t t = 0; t < tiles; t++) {
        const int64_t row = Tiles::first_row(t, tiles, rows), end = Tiles::first_row(t + 1, tiles, rows);
        operands.x = x + row * operands.x_bytes;
        multiplier.template multiply<Op>(end - row, operands, Prefetch(t, tiles, ahead), kept[p] + row * kVectors);
        if (c + 1 < chunks) continue;
        for (int64_t r = row; r < end; r++)
          finish(layer, batch, begin + r, (panel + p) * kPanel, kept[p] + r * kVectors, y);
      }
    }
  }
}

// The items of a product of `all_rows` rows: some panels times a block of rows. Blocks are nearly equal, in whole tiles.
template <class Op>
struct Items {
  int64_t panels, groups, rows, count;  // panels of an item; items side by side; rows of a block; all items

  Items(const Layer& layer, int64_t all_rows) {
    const int64_t tiles = ceil_div(all_rows, Op::Tiles::kTileRows);
    const int64_t blocks = ceil_div(tiles, Op::Tiles::kBlockRows / Op::Tiles::kTileRows);
    panels = tiles > 1 ? Op::Tiles::kPanels : kPreparedPanels;
    groups = ceil_div(panels_of(layer), panels);
    rows = ceil_div(tiles, std::max<int64_t>(1, blocks)) * Op::Tiles::kTileRows;
    count = groups * blocks;
  }
  int64_t first_panel(int64_t item) const { return item % groups * panels; }
  int64_t first_row(int64_t item) const { return item / groups * rows; }
};

template <class Op>
int64_t work_of(const Layer& layer, int64_t rows) {
  return layer.outputs * (layer.gated ? 2 : 1) * steps_of<Op>(layer) * std::max(rows, kMemoryRows);
}

template <class Op, class Out>
void run_item(const Layer& layer, const Batch& batch, Out* y, int64_t item, int64_t threads) {
  const Items<Op> items(layer, batch.rows);
  const int64_t panel = items.first_panel(item), begin = items.first_row(item);
  panels_times_rows<Op>(layer, batch, panel, std::min(items.panels, panels_of(layer) - panel), begin,
                        std::min(items.rows, batch.rows - begin),
                        threads * items.panels * steps_of<Op>(layer) * kStepBytes, y);
}

template <class Op, class Out>
void multiply(const Layer& layer, const Batch& batch, Out* y, int threads) {
  if (work_of<Op>(layer, batch.rows) < kSerialWork) threads = 1;
  const int64_t items = Items<Op>(layer, batch.rows).count;
  if (threads == 1) {  // without the runtime's work for a team of one
    for (int64_t item = 0; item < items; item++) run_item<Op>(layer, batch, y, item, 1);
    return;
  }
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
  for (int64_t item = 0; item < items; item++) run_item<Op>(layer, batch, y, item, threads);
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
    kernels::quantise_rows(sizeof(Element) == 2, x + row * layer.inputs, byte_rows + row * x_bytes, row_scales + row, 1,
                           layer.inputs, x_bytes);
  multiply<Int8Quads>(layer, {(const char*)byte_rows, x_bytes, row_scales, rows}, y, threads);
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

int64_t Product::items() const {
  return with_types(*this, [&](auto op, auto) { return Items<decltype(op)>(*layer, batch.rows).count; });
}

int64_t Product::work() const {
  return with_types(*this, [&](auto op, auto) { return work_of<decltype(op)>(*layer, batch.rows); });
}

void Product::run(int64_t item, int64_t threads) const {
  with_types(*this, [&](auto op, auto element) {
    run_item<decltype(op)>(*layer, batch, (decltype(element)*)y, item, threads);
  });
}

const char* Product::weights(int64_t item, int64_t* bytes) const {
  return with_types(*this, [&](auto op, auto) {
    using Op = decltype(op);
    const Items<Op> items(*layer, batch.rows);
    const int64_t panel = items.first_panel(item), panel_bytes = kStepBytes * steps_of<Op>(*layer);
    *bytes = std::min(items.panels, panels_of(*layer) - panel) * panel_bytes;
    return layer->packed + panel * panel_bytes;
  });
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
}
