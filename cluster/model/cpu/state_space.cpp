// What lies between the first product of a mixer of Mamba 2 and its gated norm, over states in their pages (Dao and Gu,
// "Transformers are SSMs", 2024; as transformers' modules of Bamba, Granite, Falcon-H1 and Nemotron-H compute it).
//
//   x, B, C = silu(conv(row));  dt = softplus(row + shift), within limits
//   S = S * exp(dt * rate);  S += dt * x outer B;  out = S C + skip * x
//
// An item is one head of one sequence. What a sequence gives depends neither on the others nor, but for the limits of dt, on
// how its tokens are divided into steps: transformers leaves dt of a single token that follows others as it is.

#include <cmath>
#include <utility>
#include <vector>

#include "convolved.h"

namespace {

// One token: S [width, state_width].
void recur(float* s, const float* x, const float* b, const float* c, float kept, float time, float skip, int64_t width,
           int64_t state_width, float* out) {
  for (int64_t p = 0; p < width; p++, s += state_width) {
    const float written = time * x[p];
    Floats sum = {};
    for (int64_t i = 0; i < state_width; i += kLanes) {
      const Floats next = load<Floats>(s + i) * kept + load<Floats>(b + i) * written;
      store(s + i, next);
      sum += next * load<Floats>(c + i);
    }
    out[p] = sum_of(sum) + skip * x[p];
  }
}

template <class Element>
void run(const StateSpaceMixer& own, const MixerStep& step, const Element* rows, float* out, int64_t item) {
  const int64_t sequence = item / own.heads, head = item % own.heads, heads_a_group = own.heads / own.groups;
  const int64_t width = own.head_width, states = own.state_width, group = head / heads_a_group;
  const Convolution& convolution = own.convolution;
  static thread_local std::vector<float> memory;
  memory.resize(width * states + Channels<Element>::floats(convolution, width + 2 * states) +
                convolution.taps * (width + states));
  float* next = memory.data();
  const auto take = [&](int64_t count) { return std::exchange(next, next + count); };
  float* state = take(width * states);
  Element* kept = (Element*)take(convolution.taps * (width + states));
  const auto channels = [&](int64_t channel, int64_t count) {
    float* memory = take(Channels<Element>::floats(convolution, count));
    return Channels<Element>(convolution, channel, own.first + channel, count, memory);
  };
  Channels<Element> x = channels(head * width, width), b = channels(own.heads * width + group * states, states),
                    c = channels(own.heads * width + (own.groups + group) * states, states);
  const int64_t offset = own.state_offset + head * width * states * (int64_t)sizeof(float);
  const int64_t bytes = width * states * (int64_t)sizeof(float), first = step.sequences[sequence];
  const int64_t* before = pages_before(step, sequence);
  if (before)
    read_states(own.mixer, step, before, offset, bytes, state);
  else
    std::fill(state, state + width * states, 0.0f);
  for (Channels<Element>* part : {&x, &b, &c}) part->read(own.mixer, step, before, kept);
  for (int64_t span = first; span < step.sequences[sequence + 1]; span++) {
    const int64_t end = step.starts[span + 1];
    const bool is_limited = end - step.starts[span] > 1 || (span == first && !before);
    for (int64_t t = step.starts[span]; t < end; t += kBlock) {
      const int64_t n = std::min<int64_t>(kBlock, end - t);
      const Element* row = rows + t * convolution.row_width;
      for (Channels<Element>* part : {&x, &b, &c}) part->take(row, n);
      for (int64_t i = 0; i < n; i++) {
        const float raw = as_float(row[i * convolution.row_width + own.steps + head]) + own.shifts[head];
        float time = rounded_number<Element>(softplus(rounded_number<Element>(raw)));
        if (is_limited) time = std::min(std::max(time, (float)own.low), (float)own.high);
        recur(state, x.outputs + i * width, b.outputs + i * states, c.outputs + i * states, std::exp(time * own.rates[head]),
              time, own.skips[head], width, states, out + ((t + i) * own.heads + head) * width);
      }
    }
    if (const int64_t* after = pages_after(step, span)) {
      write_states(own.mixer, step, after, offset, bytes, state);
      x.write(own.mixer, step, after, kept);
      if (head % heads_a_group == 0) {  // B and C are the group's
        b.write(own.mixer, step, after, kept);
        c.write(own.mixer, step, after, kept);
      }
    }
  }
}

}  // namespace

extern "C" {

// rows [tokens, row_width], out [tokens, heads, head_width] float32.
void run_state_space(const Mixer* mixer, const MixerStep* step, const void* rows, void* out, int64_t item) {
  const StateSpaceMixer& own = *(const StateSpaceMixer*)mixer;
  if (mixer->is_bf16)
    run(own, *step, (const BFloat16*)rows, (float*)out, item);
  else
    run(own, *step, (const float*)rows, (float*)out, item);
}
}
