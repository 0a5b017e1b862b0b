// A checksum over bytes that lie scattered in memory. `checksum.py` says what it is and holds the same arithmetic in numpy.
//
// Plain C interface, mirrored by native.py; no state.

#include <algorithm>
#include <cstdint>

extern "C" {
struct Extent {
  uint64_t address, bytes;
};
}

namespace {

constexpr int kStreams = 256;  // words of the stream go round them
constexpr uint64_t kMultiplier = 0x9e3779b97f4a7c15, kStep = 0xbf58476d1ce4e5b9;
typedef uint64_t Word __attribute__((aligned(1), may_alias));

// One to one in either argument: a changed word changes the state, whatever comes after it. The halves change places
// because a product carries upwards only.
inline uint64_t mixed(uint64_t state, uint64_t word) {
  const uint64_t product = (state ^ word) * kMultiplier;
  return product << 32 | product >> 32;
}

struct Stream {
  alignas(64) uint64_t states[kStreams];
  int64_t next = 0;          // stream that takes the next word
  uint64_t pending = 0;      // bytes that do not make a word yet
  int num_pending = 0;
  uint64_t num_bytes = 0;

  Stream() {
    for (int i = 0; i < kStreams; i++) states[i] = (i + 1) * kStep;
  }
  void take_words(const uint8_t* bytes, int64_t words) {
    while (words > 0) {
      const int64_t count = std::min(words, kStreams - next);
      const Word* source = (const Word*)bytes;
      uint64_t* target = states + next;
      if (count == kStreams) {
        for (int i = 0; i < kStreams; i++) states[i] = mixed(states[i], source[i]);
      } else {
        for (int64_t i = 0; i < count; i++) target[i] = mixed(target[i], source[i]);
      }
      next = (next + count) % kStreams, words -= count, bytes += 8 * count;
    }
  }
  void take_byte(uint8_t byte) {
    pending |= (uint64_t)byte << 8 * num_pending;
    if (++num_pending < 8) return;
    take_words((const uint8_t*)&pending, 1);
    pending = num_pending = 0;
  }
  void take(const uint8_t* bytes, int64_t count) {
    num_bytes += count;
    while (count > 0 && num_pending > 0) take_byte(*bytes++), count--;
    take_words(bytes, count / 8);
    for (bytes += count / 8 * 8, count %= 8; count > 0; count--) take_byte(*bytes++);
  }
  uint64_t finish() {
    if (num_pending > 0) take_words((const uint8_t*)&pending, 1);
    uint64_t sum = num_bytes * kStep;
    for (uint64_t state : states) sum = mixed(sum, state);
    sum = (sum ^ sum >> 32) * kStep;
    return sum ^ sum >> 29;
  }
};

}  // namespace

extern "C" {

uint64_t codec_checksum(const Extent* extents, int64_t count) {
  Stream stream;
  for (int64_t i = 0; i < count; i++) stream.take((const uint8_t*)extents[i].address, extents[i].bytes);
  return stream.finish();
}
}
