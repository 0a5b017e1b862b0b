// Some neighbouring channels of a mixer's convolution, of one sequence, block of tokens after block.

#pragma once

#include <cmath>

#include "common.h"
#include "kernels.h"
#include "state_pages.h"

namespace {

constexpr int64_t kBlock = 32;  // most tokens of a block: what is made of them stays in the second-level cache

template <class Element>
struct Channels {
  const Convolution* convolution;
  int64_t channel, column, width;  // the first one, where it is in a row, and how many
  float* inputs;                   // [taps + kBlock, width]: the last inputs, then those of a block
  float* outputs;                  // [kBlock, width]

  static int64_t floats(const Convolution& convolution, int64_t width) { return (convolution.taps + 2 * kBlock) * width; }

  Channels(const Convolution& convolution, int64_t channel, int64_t column, int64_t width, float* memory)
      : convolution(&convolution),
        channel(channel),
        column(column),
        width(width),
        inputs(memory),
        outputs(memory + (convolution.taps + kBlock) * width) {}

  // pages null: the sequence is new. kept: room for [width, taps].
  void read(const Mixer& mixer, const MixerStep& step, const int64_t* pages, Element* kept) {
    const int64_t taps = convolution->taps;
    if (!pages) return (void)std::fill(inputs, inputs + taps * width, 0.0f);
    read_states(mixer, step, pages, offset(), taps * width * sizeof(Element), kept);
    for (int64_t c = 0; c < width; c++)
      for (int64_t j = 0; j < taps; j++) inputs[j * width + c] = as_float(kept[c * taps + j]);
  }

  void write(const Mixer& mixer, const MixerStep& step, const int64_t* pages, Element* kept) const {
    const int64_t taps = convolution->taps;
    for (int64_t c = 0; c < width; c++)
      for (int64_t j = 0; j < taps; j++) store_some(kept + c * taps + j, 1, splat(inputs[j * width + c]));
    write_states(mixer, step, pages, offset(), taps * width * sizeof(Element), kept);
  }

  // Makes `outputs` of n rows, and keeps the last inputs. Convolution and silu are rounded to Element, as torch does.
  void take(const Element* rows, int64_t n) {
    const int64_t taps = convolution->taps, all = convolution->channels;
    const float *weight = convolution->weight + channel, *bias = convolution->bias ? convolution->bias + channel : nullptr;
    for (int64_t i = 0; i < n; i++)
      for (int64_t c = 0; c < width; c += kLanes)
        store(inputs + (taps + i) * width + c, widened(rows + i * convolution->row_width + column + c));
    for (int64_t i = 0; i < n; i++)
      for (int64_t c = 0; c < width; c += kLanes) {
        const float* last = inputs + (i + 1) * width + c;
        Floats sum = bias ? load<Floats>(bias + c) : Floats{};
        for (int64_t j = 0; j < taps; j++) sum += load<Floats>(weight + j * all + c) * load<Floats>(last + j * width);
        store(outputs + i * width + c, rounded<Element>(silu(rounded<Element>(sum))));
      }
    std::memmove(inputs, inputs + n * width, taps * width * sizeof(float));
  }

 private:
  int64_t offset() const { return convolution->state_offset + channel * convolution->taps * (int64_t)sizeof(Element); }
};

template <class Element>
inline float rounded_number(float value) {
  return rounded<Element>(splat(value))[0];
}

inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

}  // namespace
