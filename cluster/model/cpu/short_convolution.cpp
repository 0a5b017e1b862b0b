// What lies between the products of a mixer with a short convolution (LFM2), over states in their pages.
//
//   out = C * conv(B * x), by channels; a state is the last inputs of the convolution
//
// An item is some channels of one sequence. What a sequence gives depends neither on the others nor on how its tokens are
// divided into steps.

#include "common.h"
#include "kernels.h"
#include "state_pages.h"

namespace {

constexpr int64_t kChannels = 256;  // of an item
constexpr int64_t kMostTaps = 8;

template <class Element>
void convolve(const ConvolutionMixer& own, const MixerStep& step, const Element* rows, Element* out, int64_t item) {
  const int64_t sequence = item / own.mixer.items, first = item % own.mixer.items * kChannels, taps = own.taps;
  const int64_t width = std::min(kChannels, own.channels - first), channels = own.channels;
  const int64_t offset = first * taps * (int64_t)sizeof(Element), bytes = width * taps * (int64_t)sizeof(Element);
  float inputs[kMostTaps][kChannels] = {};
  Element kept[kMostTaps * kChannels];
  if (const int64_t* pages = pages_before(step, sequence)) {
    read_states(own.mixer, step, pages, offset, bytes, kept);
    for (int64_t c = 0; c < width; c++)
      for (int64_t j = 0; j < taps; j++) inputs[j][c] = as_float(kept[c * taps + j]);
  }
  for (int64_t span = step.sequences[sequence]; span < step.sequences[sequence + 1]; span++) {
    for (int64_t c = 0; c < width; c += kLanes) {
      Floats last[kMostTaps];
      for (int64_t j = 0; j < taps; j++) last[j] = load<Floats>(inputs[j] + c);
      for (int64_t t = step.starts[span]; t < step.starts[span + 1]; t++) {
        const Element* row = rows + 3 * channels * t + first + c;
        for (int64_t j = 0; j + 1 < taps; j++) last[j] = last[j + 1];
        last[taps - 1] = rounded<Element>(widened(row) * widened(row + 2 * channels));
        Floats sum = own.bias ? load<Floats>(own.bias + first + c) : Floats{};
        for (int64_t j = 0; j < taps; j++) sum += load<Floats>(own.weight + j * channels + first + c) * last[j];
        store_floats(out + channels * t + first + c, rounded<Element>(sum) * widened(row + channels));
      }
      for (int64_t j = 0; j < taps; j++) store(inputs[j] + c, last[j]);
    }
    if (const int64_t* pages = pages_after(step, span)) {
      for (int64_t c = 0; c < width; c++)
        for (int64_t j = 0; j < taps; j++) store_some(kept + c * taps + j, 1, splat(inputs[j][c]));
      write_states(own.mixer, step, pages, offset, bytes, kept);
    }
  }
}

}  // namespace

extern "C" {

int64_t convolution_channels() { return kChannels; }
int64_t convolution_taps() { return kMostTaps; }

// rows [tokens, 3, channels], out [tokens, channels].
void run_short_convolution(const Mixer* mixer, const MixerStep* step, const void* rows, void* out, int64_t item) {
  const ConvolutionMixer& own = *(const ConvolutionMixer*)mixer;
  if (mixer->is_bf16)
    convolve(own, *step, (const BFloat16*)rows, (BFloat16*)out, item);
  else
    convolve(own, *step, (const float*)rows, (float*)out, item);
}
}
