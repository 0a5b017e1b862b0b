// Weights into the panels that linear.cpp reads, once, when a model is loaded.

#include <vector>

#include "common.h"
#include "kernels.h"

namespace {

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

template <class Element>
void pack_plain(const Element* first, const Element* second, char* packed, int64_t outputs, int64_t inputs) {
  constexpr int64_t kInputs = 4 / sizeof(Element);  // of a step
  const int64_t steps = (inputs + kInputs - 1) / kInputs;
  for_each_row(first, second, outputs, inputs, steps, packed, [&](int64_t, const Element* row, char* target) {
    for (int64_t k = 0; k < inputs; k++)
      std::memcpy(target + k / kInputs * kStepBytes + k % kInputs * sizeof(Element), row + k, sizeof(Element));
  });
}

template <class Element>
void pack_quantised(const Element* first, const Element* second, char* packed, float* scales, int32_t* sums,
                    int64_t outputs, int64_t inputs) {
  const int64_t steps = (inputs + 3) / 4;
  std::vector<uint8_t> bytes(inputs);
  for_each_row(first, second, outputs, inputs, steps, packed, [&](int64_t column, const Element* row, char* target) {
    kernels::quantise_rows(sizeof(Element) == 2, row, bytes.data(), scales + column, 1, inputs, inputs);
    int32_t sum = 0;
    for (int64_t k = 0; k < inputs; k++) {
      int value = (int)bytes[k] - 128;
      sum += value;
      target[k / 4 * kStepBytes + k % 4] = (char)value;
    }
    sums[column] = 128 * sum;
  });
}

}  // namespace

extern "C" {

int64_t panel_outputs() { return kPanel; }

// `up` is null unless the layer is gated. `packed`: ceil(rows of weights / panel_outputs()) panels of ceil(inputs / inputs a
// step) steps.
void pack_f32(const float* weight, const float* up, char* packed, int64_t outputs, int64_t inputs) {
  pack_plain(weight, up, packed, outputs, inputs);
}
void pack_bf16(const BFloat16* weight, const BFloat16* up, char* packed, int64_t outputs, int64_t inputs) {
  pack_plain(weight, up, packed, outputs, inputs);
}
// scales and sums: one for each packed output, zeroed by the caller.
void pack_i8_f32(const float* weight, const float* up, char* packed, float* scales, int32_t* sums, int64_t outputs,
                 int64_t inputs) {
  pack_quantised(weight, up, packed, scales, sums, outputs, inputs);
}
void pack_i8_bf16(const BFloat16* weight, const BFloat16* up, char* packed, float* scales, int32_t* sums, int64_t outputs,
                  int64_t inputs) {
  pack_quantised(weight, up, packed, scales, sums, outputs, inputs);
}
}
