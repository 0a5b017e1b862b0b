// What this processor can do at most, for `python -m bench.kernels`: multiply-adds that stay in registers, with the
// instructions of each type of weights, and reading memory. Each thread works on its own. One thread is timed by its CPU
// time, so that other programs do not count; several are timed by the clock.

#include <ctime>
#include <vector>

#include "product_tiles.h"

namespace {

constexpr int kSums = kVectors == 4 ? 24 : 12;  // of a register tile
constexpr int64_t kRounds = 1 << 18;

double now(int threads) {
  timespec time;
  clock_gettime(threads == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &time);
  return time.tv_sec + 1e-9 * time.tv_nsec;
}

template <class Work>
double seconds_of(int threads, Work work) {
  const double start = now(threads);
  work();
  return now(threads) - start;
}

// Returns how many multiplications and additions it made.
template <class Op>
double multiply_in_registers() {
#if defined(__AMX_TILE__)
  if constexpr (Op::Tiles::kDepth > 1) {
    MatrixUnit().multiply_in_registers<typename Op::Tiles::Type>(kRounds);
    return 2.0 * 4 * 16 * 16 * MatrixUnit::kWords * Op::kInputs * kRounds;
  }
#endif
  typename Op::Accumulator sums[kSums] = {};
  typename Op::Operand x = {}, w = {};
  for (int64_t round = 0; round < kRounds; round++) {
#pragma GCC unroll 24
    for (int i = 0; i < kSums; i++) {
      asm volatile("" : "+v"(x), "+v"(w));  // as if they had changed
      Op::add(sums[i], x, w);
    }
  }
#pragma GCC unroll 24
  for (int i = 0; i < kSums; i++) asm volatile("" : "+v"(sums[i]));
  return 2.0 * kLanes * Op::kInputs / Op::kPasses * kSums * kRounds;
}

// Multiplications and additions a second of all threads.
template <class Op>
double operations_per_s(int threads) {
  double operations = 0;
  const double seconds = seconds_of(threads, [&] {
#pragma omp parallel num_threads(threads) reduction(+ : operations)
    operations += multiply_in_registers<Op>();
  });
  return operations / seconds;
}

// The sum of all words, as fast as they arrive.
Ints sum_of_words(const char* data, int64_t bytes) {
  Ints sums[4] = {};
  for (int64_t i = 0; i + 4 * kVectorBytes <= bytes; i += 4 * kVectorBytes) {
    for (int line = 0; line < 4 * kVectorBytes; line += 64) __builtin_prefetch(data + i + kStreamAhead + line);
    for (int v = 0; v < 4; v++) sums[v] += load<Ints>(data + i + v * kVectorBytes);
  }
  return sums[0] + sums[1] + sums[2] + sums[3];
}

}  // namespace

extern "C" {

double peak_f32(int threads) { return operations_per_s<Float32>(threads); }
double peak_bf16(int threads) { return operations_per_s<BFloat16Pairs>(threads); }
double peak_i8(int threads) { return operations_per_s<Int8Quads>(threads); }

double read_bytes_per_s(const char* data, int64_t bytes, int threads) {
  std::vector<Ints> sums(threads);
  const int64_t share = bytes / threads / 64 * 64;
  const double seconds = seconds_of(threads, [&] {
#pragma omp parallel for num_threads(threads)
    for (int thread = 0; thread < threads; thread++) sums[thread] = sum_of_words(data + thread * share, share);
  });
  for (const Ints& sum : sums) asm volatile("" : : "m"(sum));
  return (double)share * threads / seconds;
}
}
