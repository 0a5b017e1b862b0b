// Products on the processor's matrix unit (AMX). Part of linear.cpp and attention.cpp; compiled where the variant has AMX.
//
// Operands are words of 4 bytes, as everywhere here: a[row][word] lies as it is, b[word][column] as weights, K and V are
// packed for the other instructions, too. A tile register holds 16 rows of 64 bytes. A block is up to 32 rows of a times all
// columns: two tiles of a times two of b, so that a tile is loaded for each half multiplication; or, up to 16 rows, one tile
// of a times four of b. The unit adds up 16 words before it adds them to a sum. So a sum does not depend on how a product is cut
// into blocks, as long as it is cut at multiples of 16 words.

#pragma once

#include <type_traits>

#include "common.h"

#if defined(__AMX_TILE__)

namespace {

// c[row, column] = sum over words, added to c unless `is_first`. Strides are in bytes from row to row.
struct MatrixProduct {
  const char* a;
  int64_t a_bytes;
  const char* b;
  int64_t b_bytes;
  char* c;
  int64_t c_bytes;
  bool is_first;
};

struct BFloat16Matrix {};
struct Int8Matrix {};  // a unsigned, b signed

// The instructions name their registers.
#define EACH_DEPTH                                                                              \
  const char *a = product.a, *b = product.b;                                                    \
  for (int64_t word = 0; word < words; word += depth, a += 4 * depth, b += depth * product.b_bytes)
#define BEGIN_SUM(tile, rows, column)                             \
  if (product.is_first)                                           \
    _tile_zero(tile);                                             \
  else                                                            \
    _tile_loadd(tile, product.c + (rows) * product.c_bytes + (column) * 64, product.c_bytes)
#define KEEP_SUM(tile, rows, column) \
  _tile_stored(tile, product.c + (rows) * product.c_bytes + (column) * 64, product.c_bytes)
#define ADD(sum, a_tile, b_tile)                      \
  if constexpr (std::is_same_v<Type, BFloat16Matrix>) \
    _tile_dpbf16ps(sum, a_tile, b_tile);              \
  else                                                \
    _tile_dpbusd(sum, a_tile, b_tile)

// The tile registers of this thread, configured while it lives: tiles 0 and 1 are of a, 2 and 3 of b, 4 to 7 are sums.
class MatrixUnit {
 public:
  static constexpr int kRows = 32, kWords = 16;  // of a block; of a tile

  ~MatrixUnit() {
    if (rows_) _tile_release();  // else every switch of threads would save them
  }

  // `vectors`: of 16 columns. `fetch()` is called before each multiplication of two tiles, but for the last columns of a
  // number that the block does not have.
  template <class Type, class Fetch>
  void multiply(MatrixProduct product, int64_t rows, int64_t vectors, int64_t words, Fetch fetch) {
    asm volatile("" : : : "memory");  // gcc does not know that a tile's instructions read memory
    const int64_t whole = words / kWords * kWords;
    if (whole) run<Type>(product, rows, vectors, kWords, whole, fetch);
    if (words == whole) return;
    product.a += 4 * whole;
    product.b += whole * product.b_bytes;
    product.is_first &= whole == 0;
    run<Type>(product, rows, vectors, words - whole, words - whole, fetch);
  }

  // Four multiplications of whole tiles a round, of nothing that is loaded: as fast as the unit can.
  template <class Type>
  void multiply_in_registers(int64_t rounds) {
    configure(kRows, kWords);
    for (int64_t round = 0; round < rounds; round++) {
      ADD(4, 0, 2);
      ADD(5, 0, 3);
      ADD(6, 1, 2);
      ADD(7, 1, 3);
    }
  }

 private:
  struct alignas(64) Configuration {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
    void set(int tile, int64_t tile_rows, int64_t bytes) {
      rows[tile] = tile_rows;
      row_bytes[tile] = tile_rows ? bytes : 0;
    }
  };

  void configure(int64_t rows, int64_t depth) {
    if (rows == rows_ && depth == depth_) return;
    rows_ = rows, depth_ = depth;
    const int64_t high = std::min<int64_t>(rows, 16), low = rows - high;
    Configuration tiles;
    tiles.set(0, high, 4 * depth);
    tiles.set(1, low, 4 * depth);
    for (int tile = 2; tile < 4; tile++) tiles.set(tile, depth, 64);
    for (int tile = 4; tile < 8; tile++) tiles.set(tile, low && tile >= 6 ? low : high, 64);
    asm volatile("" : : : "memory");
    _tile_loadconfig(&tiles);
  }

  // `depth`: words of a tile; `words`: a multiple of it.
  template <class Type, class Fetch>
  void run(MatrixProduct product, int64_t rows, int64_t vectors, int64_t depth, int64_t words, Fetch& fetch) {
    configure(rows, depth);
    const auto advance = [&](int64_t done) {
      product.b += 64 * done, product.c += 64 * done, vectors -= done;
    };
    if (rows > 16) {
      for (; vectors >= 2; advance(2)) high_block<Type, 2>(product, depth, words, fetch);
      if (vectors) high_block<Type, 1>(product, depth, words, fetch);
      return;
    }
    for (; vectors >= 4; advance(4)) low_block<Type, 4>(product, depth, words, fetch);
    for (; vectors; advance(1)) low_block<Type, 1>(product, depth, words, fetch);
  }

  // More than 16 rows of one or two columns.
  template <class Type, int kColumns, class Fetch>
  static void high_block(const MatrixProduct& product, int64_t depth, int64_t words, Fetch& fetch) {
    BEGIN_SUM(4, 0, 0);
    BEGIN_SUM(6, 16, 0);
    if constexpr (kColumns == 2) {
      BEGIN_SUM(5, 0, 1);
      BEGIN_SUM(7, 16, 1);
    }
    EACH_DEPTH {
      _tile_loadd(2, b, product.b_bytes);
      fetch();
      _tile_loadd(0, a, product.a_bytes);
      ADD(4, 0, 2);
      fetch();
      _tile_loadd(1, a + 16 * product.a_bytes, product.a_bytes);
      ADD(6, 1, 2);
      if constexpr (kColumns == 2) {
        fetch();
        _tile_loadd(3, b + 64, product.b_bytes);
        ADD(5, 0, 3);
        fetch();
        ADD(7, 1, 3);
      }
    }
    KEEP_SUM(4, 0, 0);
    KEEP_SUM(6, 16, 0);
    if constexpr (kColumns == 2) {
      KEEP_SUM(5, 0, 1);
      KEEP_SUM(7, 16, 1);
    }
  }

  // Up to 16 rows of one or four columns.
  template <class Type, int kColumns, class Fetch>
  static void low_block(const MatrixProduct& product, int64_t depth, int64_t words, Fetch& fetch) {
    BEGIN_SUM(4, 0, 0);
    if constexpr (kColumns == 4) {
      BEGIN_SUM(5, 0, 1);
      BEGIN_SUM(6, 0, 2);
      BEGIN_SUM(7, 0, 3);
    }
    EACH_DEPTH {
      fetch();
      _tile_loadd(0, a, product.a_bytes);
      _tile_loadd(2, b, product.b_bytes);
      ADD(4, 0, 2);
      if constexpr (kColumns == 4) {
        fetch();
        _tile_loadd(3, b + 64, product.b_bytes);
        ADD(5, 0, 3);
        fetch();
        _tile_loadd(2, b + 128, product.b_bytes);
        ADD(6, 0, 2);
        fetch();
        _tile_loadd(3, b + 192, product.b_bytes);
        ADD(7, 0, 3);
      }
    }
    KEEP_SUM(4, 0, 0);
    if constexpr (kColumns == 4) {
      KEEP_SUM(5, 0, 1);
      KEEP_SUM(6, 0, 2);
      KEEP_SUM(7, 0, 3);
    }
  }

  int64_t rows_ = 0, depth_ = 0;
};

#undef EACH_DEPTH
#undef BEGIN_SUM
#undef KEEP_SUM
#undef ADD

}  // namespace

#endif
