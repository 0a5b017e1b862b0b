// The states of a layer, which lie in pages of block memory.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "kernels.h"

namespace {

// Calls copy(page bytes, our bytes, count) for the pieces of bytes [offset, offset + bytes) of a layer's states.
template <class Copy>
void over_pages(const Mixer& mixer, const MixerStep& step, const int64_t* pages, int64_t offset, int64_t bytes, void* ours,
                Copy copy) {
  for (char* next = (char*)ours; bytes > 0;) {
    const int64_t within = offset % mixer.page_bytes, count = std::min(bytes, mixer.page_bytes - within);
    copy(step.memory + pages[mixer.first_page + offset / mixer.page_bytes] * mixer.page_bytes + within, next, count);
    offset += count, bytes -= count, next += count;
  }
}

inline void read_states(const Mixer& mixer, const MixerStep& step, const int64_t* pages, int64_t offset, int64_t bytes,
                        void* ours) {
  over_pages(mixer, step, pages, offset, bytes, ours, [](char* theirs, char* own, int64_t n) { std::memcpy(own, theirs, n); });
}

inline void write_states(const Mixer& mixer, const MixerStep& step, const int64_t* pages, int64_t offset, int64_t bytes,
                         void* ours) {
  over_pages(mixer, step, pages, offset, bytes, ours, [](char* theirs, char* own, int64_t n) { std::memcpy(theirs, own, n); });
}

// The pages of the state before a sequence, or after a span; null: there is none.
inline const int64_t* pages_before(const MixerStep& step, int64_t sequence) {
  const int64_t* pages = step.source + step.sequences[sequence] * step.pages;
  return step.pages && pages[0] >= 0 ? pages : nullptr;
}
inline const int64_t* pages_after(const MixerStep& step, int64_t span) {
  const int64_t* pages = step.target + span * step.pages;
  return step.pages && pages[0] >= 0 ? pages : nullptr;
}

}  // namespace
