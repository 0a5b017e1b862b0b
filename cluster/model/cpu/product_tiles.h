// Register tiles of a product of packed weights, for each type of weights. Part of linear.cpp.
//
// A step is four bytes of an output's weights and of a row of x: one float, two bfloat16 or four int8. Where the processor
// multiplies a step by one instruction, x is read as it lies. Else a step takes two passes, each with one half of the
// inputs widened. Where registers are few (AVX2) or widening takes several instructions (int8), x is widened before
// (`prepare`), once for a block of rows and an item's panels: the loop then takes each activation by one broadcast from
// memory, and 6 x 2 sums, 2 weights and an activation fit into AVX2's 16 registers. They fit only if each sum stays where it
// is, which gcc does not see to by itself: so these types add by an instruction of ours.

#pragma once

#include <utility>

#include "common.h"
#include "matrix_unit.h"

namespace {

constexpr int64_t kStreamAhead = 4 << 10;                      // bytes, into the first-level cache
constexpr int64_t kFarAhead = 16 << 10, kNearAhead = 1 << 10;  // bytes, into the second-level cache and then into the first
constexpr int64_t kMatrixAhead = 8 << 10;                      // bytes, into the first-level cache
constexpr int64_t kPreparedPanels = kPanel < 64 ? 64 / kPanel : 1;  // as many as use x once it is prepared

struct VectorTiles;
#if defined(__AMX_TILE__)
template <class Type>
class MatrixTiles;
using BFloat16Tiles = MatrixTiles<BFloat16Matrix>;
using Int8Tiles = MatrixTiles<Int8Matrix>;
#else
using BFloat16Tiles = VectorTiles;
using Int8Tiles = VectorTiles;
#endif

// What a product of one type of weights is made of:
// Tiles: how it is cut and multiplied (at the end of this file).
// kInputs: of a step. kPasses: over the weights of a step, which are also the words that a step of x has when prepared.
// kIsPrepared: prepare(x, target, steps) writes x as `add` wants it; else a tile of two passes calls widened_half<pass>(x).
// weight<pass>(w): a vector of the weights of a pass.
// kFarRows: from as many rows on, a single tile asks for weights far ahead (measured; see Prefetch).
struct Float32 {
  using Tiles = VectorTiles;
  using Accumulator = Floats;
  using Operand = Floats;
  static constexpr int kInputs = 1, kPasses = 1, kFarRows = kVectors == 2 ? 6 : 7;
  static constexpr bool kIsPrepared = false;
  template <int kPass>
  static Floats weight(const char* w) {
    return load<Floats>(w);
  }
  static void add(Floats& sum, Floats x, Floats w) { sum += x * w; }
};

struct BFloat16Pairs {
  using Tiles = BFloat16Tiles;
  using Accumulator = Floats;
  static constexpr int kInputs = 2;
#if defined(__AVX512BF16__)
  using Operand = Ints;
  static constexpr int kPasses = 1, kFarRows = 7;
  static constexpr bool kIsPrepared = false;
  template <int kPass>
  static Ints weight(const char* w) {
    return load<Ints>(w);
  }
  static void add(Floats& sum, Ints x, Ints w) {
    sum = (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)w);
  }
#else
  using Operand = Floats;
  static constexpr int kPasses = 2, kFarRows = kVectors == 2 ? 1 : 4;  // even inputs, odd inputs
  static constexpr bool kIsPrepared = kVectors == 2;                   // AVX-512 has registers enough to widen x in the loop
  template <int kPass>
  static Floats weight(const char* w) {
    return widened_half<kPass>(load<Words>(w));
  }
  template <int kPass>
  static Floats widened_half(Words pairs) {
    if (kPass == 1 && kVectors == 4) return (Floats)(pairs & 0xffff0000u);
    if (kPass == 1) {  // by shifts: a mask would take a register
      pairs >>= 16;
      asm("" : "+v"(pairs));
    }
    return (Floats)(pairs << 16);
  }
  static void add(Floats& sum, Floats x, Floats w) { asm("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(x), "v"(w)); }
  static void prepare(const char* x, char* target, int64_t steps) {
    const BFloat16* source = (const BFloat16*)x;
    int64_t i = 0;
    for (; i + kLanes <= 2 * steps; i += kLanes) store(target + 4 * i, widened(source + i));
    for (; i < 2 * steps; i++) store(target + 4 * i, (uint32_t)source[i].bits << 16);
  }
#endif
};

struct Int8Quads {  // x is unsigned with a zero point of 128, w is signed
  using Tiles = Int8Tiles;
  using Accumulator = Ints;
  using Operand = Ints;
  static constexpr int kInputs = 4;
#if defined(__AVX512VNNI__)
  static constexpr int kPasses = 1, kFarRows = 7;
  static constexpr bool kIsPrepared = false;
  template <int kPass>
  static Ints weight(const char* w) {
    return load<Ints>(w);
  }
  static void add(Ints& sum, Ints x, Ints w) { sum = (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)x, (__m512i)w); }
#else
  // inputs 0 and 2, inputs 1 and 3: each pair as two halves of 16 bits
  static constexpr int kPasses = 2, kFarRows = kVectors == 2 ? 2 : 4;
  static constexpr bool kIsPrepared = true;
  typedef int16_t Shorts __attribute__((vector_size(kVectorBytes), may_alias));
  template <int kPass>
  static Ints weight(const char* w) {
    const Shorts pairs = load<Shorts>(w);
    return (Ints)(kPass == 0 ? (Shorts)(pairs << 8) >> 8 : pairs >> 8);
  }
  static void add(Ints& sum, Ints x, Ints w) {
#if defined(__AVX512BW__)
    const Ints product = (Ints)_mm512_madd_epi16((__m512i)x, (__m512i)w);
#else
    const Ints product = (Ints)_mm256_madd_epi16((__m256i)x, (__m256i)w);
#endif
    asm("vpaddd %1, %0, %0" : "+v"(sum) : "v"(product));
  }
  static void prepare(const char* x, char* target, int64_t steps) {
    constexpr std::make_integer_sequence<int, kLanes> kAll{};
    int64_t step = 0;
    for (; step + kLanes <= steps; step += kLanes) {
      const Words quads = load<Words>(x + 4 * step);
      const Words first = quads & 0x00ff00ffu, second = (quads >> 8) & 0x00ff00ffu;
      store(target + 8 * step, in_turn<0>(first, second, kAll));
      store(target + 8 * step + kVectorBytes, in_turn<kLanes / 2>(first, second, kAll));
    }
    for (; step < steps; step++) {
      const uint32_t quad = load<uint32_t>(x + 4 * step);
      store(target + 8 * step, quad & 0x00ff00ffu);
      store(target + 8 * step + 4, (quad >> 8) & 0x00ff00ffu);
    }
  }
  template <int kFirst, int... kLane>
  static Words in_turn(Words a, Words b, std::integer_sequence<int, kLane...>) {
    return __builtin_shufflevector(a, b, (kFirst + kLane / 2 + kLane % 2 * kLanes)...);
  }
#endif
};

// What tile t of a panel asks for of the weights `ahead`: two cache lines of each step, all tiles together the next weights
// while they compute. A tile with nothing to fetch names what it has. A single tile reads weights once: it asks for whole steps
// some way ahead, because the hardware stops at the end of a page. Where the computation takes longer than memory, few loads
// run ahead of it and the first-level cache would hold too few misses: there it asks the second-level cache, four times as
// far ahead (5 to 40 % faster; where memory takes longer, 10 to 25 % slower; measured).
struct Prefetch {
  const int64_t t, tiles, ahead;
  int64_t first = 0, second = 0;
  Prefetch(int64_t t, int64_t tiles, int64_t ahead) : t(t), tiles(tiles), ahead(ahead) {
    const int64_t bytes = tiles < 4 ? 128 : 64;
    if (tiles == 1 || t * bytes >= kStepBytes) return;
    first = ahead + t * bytes;
    second = first + bytes - 64;
  }
};

// Some rows of x, prepared, and some steps of a panel. `is_first`: the sums begin at 0.
struct Operands {
  const char *x, *weights;
  int64_t x_bytes, steps;  // x_bytes: from row to row
  bool is_first;
};

template <class Op, int kRows, int kPass>
__attribute__((always_inline)) inline void pass(typename Op::Accumulator (&sums)[kRows][kVectors], const char* x,
                                                int64_t x_bytes, const char* w) {
  typename Op::Operand weights[kVectors];
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; v++) weights[v] = Op::template weight<kPass>(w + v * kVectorBytes);
#pragma GCC unroll 8
  for (int r = 0; r < kRows; r++) {
    const Floats word = splat_word(x + r * x_bytes + (Op::kIsPrepared ? kPass * 4 : 0));
    typename Op::Operand activation;
    if constexpr (Op::kPasses == 1 || Op::kIsPrepared)
      activation = (typename Op::Operand)word;
    else
      activation = Op::template widened_half<kPass>((Words)word);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; v++) Op::add(sums[r][v], activation, weights[v]);
  }
}

// kRows rows times a panel. `kept`: [kRows][kPanel], the sums between calls.
template <class Op, int kRows>
void tile(Operands operands, Prefetch prefetch, typename Op::Accumulator* kept) {
  typename Op::Accumulator sums[kRows][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; r++)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; v++)
      sums[r][v] = operands.is_first ? typename Op::Accumulator{} : kept[r * kVectors + v];
  const char *x = operands.x, *w = operands.weights;
  constexpr int64_t kWords = Op::kIsPrepared ? Op::kPasses : 1;  // of a step of x
  for (const char* end = w + operands.steps * kStepBytes; w != end; w += kStepBytes, x += 4 * kWords) {
    if (prefetch.tiles == 1) {
      for (int64_t line = 0; line < kStepBytes; line += 64) {
        if (kRows >= Op::kFarRows) __builtin_prefetch(w + kFarAhead + line, 0, 2);
        __builtin_prefetch(w + (kRows >= Op::kFarRows ? kNearAhead : kStreamAhead) + line);
      }
    } else {
      __builtin_prefetch(w + prefetch.first, 0, 2);
      if (kStepBytes > 64) __builtin_prefetch(w + prefetch.second, 0, 2);
    }
    pass<Op, kRows, 0>(sums, x, operands.x_bytes, w);
    if constexpr (Op::kPasses == 2) {
      if (kRows > 4 && kVectors == 2) asm volatile("" : : : "memory");  // loads them again: no register is left
      pass<Op, kRows, 1>(sums, x, operands.x_bytes, w);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; r++)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; v++) kept[r * kVectors + v] = sums[r][v];
}

// ------------------------------------------------------------------------------------------------ how tiles are computed

// kTileRows: the most rows of a tile. kDepth: chunks of steps begin at multiples of it. kBlockRows, kPanels: of an item of
// several tiles. first_row: of tile t. multiply: as `tile`.
struct VectorTiles {
  static constexpr int kTileRows = 6, kDepth = 1;
  static constexpr int64_t kBlockRows = 192, kPanels = kPreparedPanels;

  // Of nearly equal height.
  static int64_t first_row(int64_t t, int64_t tiles, int64_t rows) { return rows * t / tiles; }

  template <class Op, int kRows = kTileRows>
  static void multiply(int64_t rows, const Operands& operands, Prefetch prefetch, typename Op::Accumulator* kept) {
    if (rows == kRows) return tile<Op, kRows>(operands, prefetch, kept);
    if constexpr (kRows > 1) multiply<Op, kRows - 1>(rows, operands, prefetch, kept);
  }
};

#if defined(__AMX_TILE__)

template <class Matrix>
class MatrixTiles {
 public:
  using Type = Matrix;
  static constexpr int kTileRows = MatrixUnit::kRows, kDepth = MatrixUnit::kWords;
  static constexpr int64_t kBlockRows = 256, kPanels = 4;

  // All but the last of one height: to configure the unit takes as long as a small tile.
  static int64_t first_row(int64_t t, int64_t, int64_t rows) { return std::min(t * kTileRows, rows); }

  // Weights are asked for a few lines before each multiplication: a burst would take all buffers for misses, which the tiles
  // that come from the second-level cache need, too (steps are 5 to 20 % faster than with as many lines at once; measured).
  template <class Op>
  void multiply(int64_t rows, const Operands& operands, Prefetch prefetch, typename Op::Accumulator* kept) {
    constexpr int64_t kLines = MatrixUnit::kWords * kStepBytes / 64;  // of 16 steps
    const bool is_low = rows <= MatrixUnit::kRows / 2;                // four multiplications for 16 steps, not eight
    const int64_t tiles = prefetch.tiles;
    if (is_low && tiles == 1) {
      const char* next = operands.weights + kMatrixAhead;
      return add_products<Op>(rows, operands, kept, [&] {
        for (int64_t line = 0; line < kLines / 4; line++, next += 64) __builtin_prefetch(next);
      });
    }
    const int64_t all = operands.steps * kStepBytes / 64, share = (kLines / (is_low ? 4 : 8) + tiles - 1) / tiles;
    const char* first = operands.weights + prefetch.ahead;
    const char *next = first + all * prefetch.t / tiles * 64, *end = first + all * (prefetch.t + 1) / tiles * 64;
    add_products<Op>(rows, operands, kept, [&] {
      for (int64_t line = 0; line < share && next < end; line++, next += 64) __builtin_prefetch(next, 0, 2);
    });
  }

 private:
  template <class Op, class Fetch>
  void add_products(int64_t rows, const Operands& operands, typename Op::Accumulator* kept, Fetch fetch) {
    unit_.multiply<Type>({operands.x, operands.x_bytes, operands.weights, kStepBytes, (char*)kept, kStepBytes, operands.is_first},
                         rows, kVectors, operands.steps, fetch);
  }

  MatrixUnit unit_;
};

#endif

}  // namespace
