// What lies between the products of a mixer with the gated delta rule (Yang et al., "Gated Delta Networks", 2024, equation
// 10; as transformers' modules of Qwen3-Next and Qwen3.5 compute it), over states in their pages.
//
//   x = silu(conv(row)), cut into q, k, v;  q and k are normalised, q is divided by sqrt(key width)
//   S = S * decay;  S += k outer ((v - kT S) * beta);  out = norm(qT S) * silu(gate)
//
// An item is one key head, with its value heads, of one sequence: it reads its part of the state, takes the tokens of all
// spans in blocks, and writes its part of the state where a span keeps it. What a sequence gives depends neither on the
// others nor on how its tokens are divided into steps.

#include <cmath>
#include <utility>
#include <vector>

#include "convolved.h"

namespace {

constexpr int kColumns = 4;        // vectors of a row of S that are taken through a block at once
constexpr float kEpsilon = 1e-6f;  // under the root of the norms of q and k

inline float inverse_norm(const float* x, int64_t width) {
  Floats squares = {};
  for (int64_t i = 0; i < width; i += kLanes) squares += load<Floats>(x + i) * load<Floats>(x + i);
  return 1.0f / std::sqrt(sum_of(squares) + kEpsilon);
}

// Some vectors of the columns of S through n tokens. S: rows `values` apart. out [n, values].
template <int kV>
void recur(int64_t n, int64_t width, int64_t values, const float* q, const float* k, const float* v, const float* norms,
           const float* decay, const float* beta, float* s, float* out) {
  for (int64_t t = 0; t < n; t++, q += width, k += width, v += values, out += values, norms += 2) {
    const float k_norm = norms[1], kept = decay[t];
    Floats read[kV] = {}, delta[kV], answer[kV] = {};
    for (int64_t row = 0; row < width; row++) {
      const Floats key = splat(k[row]);
      for (int i = 0; i < kV; i++) read[i] += load<Floats>(s + row * values + i * kLanes) * key;
    }
    for (int i = 0; i < kV; i++)
      delta[i] = (load<Floats>(v + i * kLanes) - read[i] * (kept * k_norm)) * (beta[t] * k_norm);
    for (int64_t row = 0; row < width; row++) {
      const Floats key = splat(k[row]), query = splat(q[row]);
      for (int i = 0; i < kV; i++) {
        float* place = s + row * values + i * kLanes;
        const Floats next = load<Floats>(place) * kept + key * delta[i];
        store(place, next);
        answer[i] += next * query;
      }
    }
    for (int i = 0; i < kV; i++) store(out + i * kLanes, answer[i] * norms[0]);
  }
}

template <class Element>
class Head {
 public:
  Head(const DeltaMixer& mixer, const MixerStep& step, const Element* rows, Element* out, int64_t item)
      : mixer(mixer),
        step(step),
        rows(rows),
        out(out),
        sequence(item / mixer.key_heads),
        head(item % mixer.key_heads),
        group(mixer.value_heads / mixer.key_heads),
        state_floats(mixer.key_width * mixer.value_width) {
    const int64_t width = mixer.key_width, values = mixer.value_width, keys = mixer.key_heads * width;
    const Convolution& convolution = mixer.convolution;
    const int64_t conv_floats = Channels<Element>::floats(convolution, 2 * width + group * values);
    static thread_local std::vector<float> memory;
    memory.resize(group * state_floats + conv_floats + kBlock * (values + 4) + convolution.taps * (width + values));
    float* next = memory.data();
    const auto take = [&](int64_t count) { return std::exchange(next, next + count); };
    state = take(group * state_floats), answers = take(kBlock * values), norms = take(2 * kBlock);
    decay = take(kBlock), beta = take(kBlock), kept = (Element*)take(convolution.taps * (width + values));
    const auto add = [&](int64_t channel, int64_t column, int64_t width) {
      float* own = take(Channels<Element>::floats(convolution, width));
      parts.emplace_back(convolution, channel, column, width, own);
    };
    parts.clear();
    add(head * width, mixer.query + head * mixer.key_step, width);
    add(keys + head * width, mixer.key + head * mixer.key_step, width);
    for (int64_t g = 0; g < group; g++)
      add(2 * keys + (head * group + g) * values, mixer.value + head * mixer.value_step + g * values, values);
  }

  void run() {
    const int64_t first = step.sequences[sequence], end = step.sequences[sequence + 1];
    read_state(pages_before(step, sequence));
    for (int64_t span = first; span < end; span++) {
      for (int64_t t = step.starts[span]; t < step.starts[span + 1]; t += kBlock)
        take_block(t, std::min<int64_t>(kBlock, step.starts[span + 1] - t));
      if (const int64_t* pages = pages_after(step, span)) write_state(pages);
    }
  }

 private:
  void read_state(const int64_t* pages) {
    if (pages)
      read_states(mixer.mixer, step, pages, state_offset(), group * state_floats * sizeof(float), state);
    else
      std::fill(state, state + group * state_floats, 0.0f);
    for (Channels<Element>& part : parts) part.read(mixer.mixer, step, pages, kept);
  }

  void write_state(const int64_t* pages) {
    write_states(mixer.mixer, step, pages, state_offset(), group * state_floats * sizeof(float), state);
    for (const Channels<Element>& part : parts) part.write(mixer.mixer, step, pages, kept);
  }

  // Tokens [t, t + n) of the step.
  void take_block(int64_t t, int64_t n) {
    const int64_t width = mixer.key_width, values = mixer.value_width;
    const int64_t row_width = mixer.convolution.row_width;
    const Element* row = rows + t * row_width;
    for (Channels<Element>& part : parts) part.take(row, n);
    for (int64_t i = 0; i < n; i++) {
      norms[2 * i] = inverse_norm(parts[0].outputs + i * width, width) / std::sqrt((float)width);
      norms[2 * i + 1] = inverse_norm(parts[1].outputs + i * width, width);
    }
    for (int64_t g = 0; g < group; g++) {
      for (int64_t i = 0; i < n; i++) gates(row + i * row_width, g, i);
      float* s = state + g * state_floats;
      for (int64_t column = 0; column < values; column += kColumns * kLanes) {
        const float *v = parts[2 + g].outputs + column, *q = parts[0].outputs, *k = parts[1].outputs;
        switch (std::min<int64_t>(kColumns, (values - column) / kLanes)) {
          case 1: recur<1>(n, width, values, q, k, v, norms, decay, beta, s + column, answers + column); break;
          case 2: recur<2>(n, width, values, q, k, v, norms, decay, beta, s + column, answers + column); break;
          case 3: recur<3>(n, width, values, q, k, v, norms, decay, beta, s + column, answers + column); break;
          default: recur<4>(n, width, values, q, k, v, norms, decay, beta, s + column, answers + column);
        }
      }
      for (int64_t i = 0; i < n; i++) {
        const Element* gate = row + i * row_width + mixer.gate + head * mixer.value_step + g * values;
        gated_norm(answers + i * values, gate, out + ((t + i) * mixer.value_heads + head * group + g) * values);
      }
    }
  }

  // How much of new values is written, and what of the old ones is kept.
  void gates(const Element* row, int64_t g, int64_t i) {
    const int64_t column = head * mixer.gate_step + g, number = head * group + g;
    beta[i] = rounded_number<Element>(1.0f / (1.0f + std::exp(-as_float(row[mixer.beta + column]))));
    decay[i] = std::exp(mixer.rates[number] * softplus(as_float(row[mixer.decay + column]) + mixer.shifts[number]));
  }

  void gated_norm(const float* x, const Element* gate, Element* y) const {
    const int64_t width = mixer.value_width;
    const Element* weight = (const Element*)mixer.norm;
    Floats squares = {};
    for (int64_t i = 0; i < width; i += kLanes) {
      const Floats value = rounded<Element>(load<Floats>(x + i));
      squares += value * value;
    }
    const float scale = 1.0f / std::sqrt(sum_of(squares) / (float)width + (float)mixer.epsilon);
    for (int64_t i = 0; i < width; i += kLanes) {
      const Floats normed = rounded<Element>(rounded<Element>(load<Floats>(x + i)) * scale);
      store_floats(y + i, rounded<Element>(normed * widened(weight + i)) * silu(widened(gate + i)));
    }
  }

  int64_t state_offset() const { return mixer.state_offset + head * group * state_floats * (int64_t)sizeof(float); }

  const DeltaMixer& mixer;
  const MixerStep& step;
  const Element* rows;
  Element* out;
  const int64_t sequence, head, group, state_floats;
  static thread_local inline std::vector<Channels<Element>> parts;  // q, k, then a v for each value head
  float *state, *answers, *norms, *decay, *beta;
  Element* kept;
};

}  // namespace

extern "C" {

// Channels that the kernel takes at once: widths are multiples of it.
int64_t mixer_lanes() { return kLanes; }

// rows [tokens, row_width], out [tokens, value_heads, value_width].
void run_gated_delta(const Mixer* mixer, const MixerStep* step, const void* rows, void* out, int64_t item) {
  const DeltaMixer& own = *(const DeltaMixer*)mixer;
  if (mixer->is_bf16)
    Head<BFloat16>(own, *step, (const BFloat16*)rows, (BFloat16*)out, item).run();
  else
    Head<float>(own, *step, (const float*)rows, (float*)out, item).run();
}

// Any mixer, alone.
void run_mixer(const Mixer* mixer, const MixerStep* step, const void* rows, void* out, int threads) {
  const int64_t items = mixer->items * step->num_sequences;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
  for (int64_t item = 0; item < items; item++) mixer->run(mixer, step, rows, out, item);
}
}
