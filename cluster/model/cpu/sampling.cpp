// Draws the Gumbel-max token of a row: argmax over token ids of score + noise, both as `cluster/model/sampling.py` defines them.
//
// The two logarithms are dear, and only the winner's matter. So a token is first asked whether it can still win, in integers,
// and what is left, some hundreds of a row, is worked out in double:
//
//   A token wins only with  score + g >= best,  where g = -log(-log(u)) and `best` is any sum seen so far (at the start: the
//   largest score plus a bit less than the least noise there is). With m >= score and x = best - m that needs g >= x, which is
//   -log(u) <= exp(-x). As 1 - u <= -log(u), it needs 1 - u <= exp(-x) =: p, so
//
//       bits >= 2^53 (1 - p) - 1          (u is (bits + 1/2) / 2^53 rounded, never more than 2^-53 away)
//
//   That is one comparison of integers a token, with one exp for a run of tokens whose largest score is m. Rounding can only
//   let more tokens through: x is lowered by 1e-9 + 2^-50 |best|. Where g >= x decides, |x| <= 40, so best - m, either
//   logarithm and the exp are off by less than 1e-13 together, and the sum score + noise by less than 2^-52 |best| + 1e-13.
//   The 3 that the threshold is lowered by is for the - 1 above and two roundings.
//
//   Expected number of tokens left: best is log(sum of exp(score) seen) + Gumbel noise, so of n runs of 64 tokens about
//   64 (1 + log n) at most, whatever the scores. Counted in rows of 151,936: 72 where all are equal, 280 of a normal
//   distribution of deviation 2.5, 545 where every run has one high score. Only where the scores are so large that noise is
//   lost in their rounding are all that are equal left.
//
// The result is the one that all tokens in double would give, with libm's log: it differs from another log's only where two
// tokens' sums are closer than double's rounding. No state; compiled for AVX-512 and for AVX2.

#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // of gcc's own AVX-512 headers, up to 12

#include <cfloat>
#include <cmath>

#include "common.h"

namespace {

constexpr uint64_t kGamma = 0x9E3779B97F4A7C15, kMix1 = 0xBF58476D1CE4E5B9, kMix2 = 0x94D049BB133111EB;
constexpr int kRun = 64;                 // tokens that share a threshold
constexpr double kMostNoise = 36.75;     // of u = 1 - 2^-53
constexpr double kLeastNoise = -3.63;    // of u = 2^-54
constexpr int64_t kSerialTokens = 1 << 17;  // fewer take less time than to wake a thread

typedef uint64_t Longs __attribute__((vector_size(kVectorBytes), may_alias));
constexpr int kLongs = kVectorBytes / 8;

template <class Integer>  // uint64_t or Longs
inline Integer mixed(Integer x) {
  x = (x ^ (x >> 30)) * kMix1;
  x = (x ^ (x >> 27)) * kMix2;
  return x ^ (x >> 31);
}

struct Row {
  const float* logits;
  int64_t tokens;
  uint64_t key;
  float temperature;

  float score(int64_t token) const { return logits[token] / temperature; }
  uint64_t random(int64_t token) const { return mixed(key + (uint64_t)(token + 1) * kGamma); }
  double sum(int64_t token) const {
    const double u = std::min(((double)(random(token) >> 11) + 0.5) * 0x1p-53, 1 - 0x1p-53);
    return score(token) - std::log(-std::log(u));
  }
};

struct Extent {
  float largest;
  bool ordered;  // no NaN among them
};

inline Extent extent_of(const float* logits, int64_t count) {
  float largest = -INFINITY;
  bool ordered = true;
  int64_t i = 0;
  if (count >= kLanes) {
    Floats most = load<Floats>(logits);
    Ints unordered = most != most;
    for (i = kLanes; i + kLanes <= count; i += kLanes) {
      const Floats value = load<Floats>(logits + i);
      unordered |= value != value;
      most = larger(most, value);
    }
    largest = ::largest(most);
    for (int lane = 0; lane < kLanes; lane++) ordered &= unordered[lane] == 0;
  }
  for (; i < count; i++) {
    ordered &= logits[i] == logits[i];
    largest = std::max(largest, logits[i]);
  }
  return {largest, ordered};
}

// Every sum, where bounds would not hold: NaN counts as the largest, as in torch, and of equal sums the first wins.
int64_t draw_from_all(const Row& row) {
  int64_t winner = 0;
  double best = row.sum(0);
  for (int64_t token = 1; token < row.tokens && best == best; token++) {
    const double sum = row.sum(token);
    if (!(sum <= best)) winner = token, best = sum;
  }
  return winner;
}

// The least random word with which a score <= `most` can reach `best`, or 0 where any can.
inline uint64_t threshold(double best, float most) {
  const double p = std::exp(most - best + 1e-9 + 0x1p-50 * std::fabs(best));
  if (!(p < 1)) return 0;
  constexpr uint64_t kAll = 1ull << 53;
  return (kAll - std::min((uint64_t)(p * 0x1p53) + 3, kAll)) << 11;
}

inline bool any_reaches(const Row& row, int64_t first, uint64_t least) {
  Longs word = {};
  for (int lane = 0; lane < kLongs; lane++) word[lane] = row.key + (uint64_t)(first + lane + 1) * kGamma;
  Longs reached = {};
  for (int i = 0; i < kRun / kLongs; i++) {
    reached |= (Longs)(mixed(word) >= least);
    word += kLongs * kGamma;
  }
  uint64_t any = 0;
  for (int lane = 0; lane < kLongs; lane++) any |= reached[lane];
  return any != 0;
}

int64_t draw(const Row& row) {
  const Extent extent = extent_of(row.logits, row.tokens);
  const float most = extent.largest / row.temperature;
  if (!extent.ordered || !(row.temperature >= FLT_MIN && row.temperature <= FLT_MAX && std::fabs(most) <= FLT_MAX))
    return draw_from_all(row);
  int64_t winner = row.tokens;
  double best = most + kLeastNoise;
  for (int64_t first = 0; first < row.tokens; first += kRun) {
    const int64_t end = std::min(first + kRun, row.tokens);
    const float run_most = extent_of(row.logits + first, end - first).largest / row.temperature;
    if (run_most + kMostNoise < best - 0x1p-50 * std::fabs(best)) continue;
    const uint64_t least = threshold(best, run_most);
    if (!any_reaches(row, first, least)) continue;
    for (int64_t token = first; token < end; token++) {
      if (row.random(token) < least) continue;
      const double sum = row.sum(token);
      if (sum > best || (sum == best && winner == row.tokens)) winner = token, best = sum;
    }
  }
  return winner;
}

}  // namespace

extern "C" {

// tokens[i] drawn from logits[rows[i] * stride ..][0, vocab_size) / temperatures[i] with the key keys[i]. Logits of -inf are
// never drawn, unless there are no others: then 0 is.
void draw_tokens(const float* logits, int64_t stride, int64_t vocab_size, const int64_t* rows, const uint64_t* keys,
                 const float* temperatures, int64_t* tokens, int64_t count, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && count > 1 && count * vocab_size > kSerialTokens)
  for (int64_t i = 0; i < count; i++)
    tokens[i] = draw({logits + rows[i] * stride, vocab_size, keys[i], temperatures[i]});
}
}
