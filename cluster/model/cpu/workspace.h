// Memory between the phases of a call: laid out for each call, kept by the caller and reused.

#pragma once

#include <cstdint>
#include <vector>

namespace {

// Pieces of one block of memory, each at the start of a cache line. Without memory it only adds up what they take.
struct Workspace {
  char* memory;
  int64_t taken = 0;

  char* take(int64_t bytes) {
    char* piece = memory + taken;
    taken += (bytes + 63) / 64 * 64;
    return memory ? piece : nullptr;
  }
};

// For what `lay_out(workspace)` takes; `memory` grows if it is too small.
template <class LayOut>
Workspace workspace_for(std::vector<char>& memory, LayOut lay_out) {
  Workspace sizes{nullptr};
  lay_out(sizes);
  if ((int64_t)memory.size() < sizes.taken + 64) memory.resize(sizes.taken + 64);
  return {memory.data() + (64 - (uintptr_t)memory.data() % 64) % 64};
}

}  // namespace
