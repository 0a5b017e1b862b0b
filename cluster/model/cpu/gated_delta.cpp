// The gated delta rule with the short convolution in front of it, over states in place (Yang et al., "Gated Delta
// Networks", 2024, equation 10; as transformers' modules of Qwen3-Next and Qwen3.5 compute it).
//
//   x = silu(conv(mixed)), cut into q, k, v;  q and k are normalised, q is divided by sqrt(Dk)
//   S = S * decay;  S += k outer ((v - kT S) * beta);  out = qT S
//
// Columns of S do not depend on each other: a thread takes some columns of one head of one sequence through all tokens,
// and they stay in its first-level cache. What a sequence gives does not depend on the others.

#include <cmath>

#include "common.h"

namespace {

constexpr int64_t kColumns = 2 * kLanes;  // of S, that a thread takes at once
constexpr int64_t kChannels = 512;        // of the convolution, that a thread takes at once
constexpr float kEpsilon = 1e-6f;         // under the root of the norms

struct Shape {
  int64_t sequences, tokens;                            // tokens of each sequence
  int64_t key_heads, value_heads, key_width, value_width;
  int64_t taps;                                         // of the convolution
  int64_t state_bytes, conv_offset, delta_offset;       // of a sequence; in it
  int64_t channels() const { return 2 * key_heads * key_width + value_heads * value_width; }
};

inline float as_float(float value) { return value; }
inline float as_float(BFloat16 value) {
  const uint32_t bits = (uint32_t)value.bits << 16;
  return load<float>(&bits);
}

// The convolution of channels [first, end) of one sequence, then silu; both are rounded to Element, as torch does. Its
// state [channels, taps] has the last inputs. weight [taps, channels] float32; history [taps + tokens, channels] and
// y [tokens, channels] float32.
template <class Element>
void convolve(const Shape& shape, int64_t first, int64_t end, const Element* x, const float* weight, Element* state,
              float* history, float* y) {
  const int64_t channels = shape.channels(), taps = shape.taps, tokens = shape.tokens;
  for (int64_t c = first; c < end; c++)
    for (int64_t j = 0; j < taps; j++) history[j * channels + c] = as_float(state[c * taps + j]);
  for (int64_t t = 0; t < tokens; t++)
    for (int64_t c = first; c < end; c += kLanes)
      store(history + (taps + t) * channels + c, widened(x + t * channels + c));
  for (int64_t t = 0; t < tokens; t++)
    for (int64_t c = first; c < end; c += kLanes) {
      const float* inputs = history + (t + 1) * channels + c;
      Floats sum = {};
      for (int64_t j = 0; j < taps; j++) sum += load<Floats>(weight + j * channels + c) * load<Floats>(inputs + j * channels);
      store(y + t * channels + c, rounded<Element>(silu(rounded<Element>(sum))));
    }
  for (int64_t c = first; c < end; c++)
    for (int64_t j = 0; j < taps; j++) store_some(state + c * taps + j, 1, splat(history[(tokens + j) * channels + c]));
}

inline float inverse_norm(const float* x, int64_t width) {
  Floats squares = {};
  for (int64_t i = 0; i < width; i += kLanes) squares += load<Floats>(x + i) * load<Floats>(x + i);
  return 1.0f / std::sqrt(sum_of(squares) + kEpsilon);
}

// Some columns of one head through all tokens. q, k, v: of the first token; S: the columns, rows `value_width` apart.
template <class Element, int kVectorsHere>
void recur(const Shape& shape, const float* q, const float* k, const float* v, const float* decay, const float* beta,
           const float* norms, float* s, Element* out) {
  const int64_t width = shape.key_width, stride = shape.value_width, channels = shape.channels();
  for (int64_t t = 0; t < shape.tokens; t++, q += channels, k += channels, v += channels, norms += 2,
               decay += shape.value_heads, beta += shape.value_heads, out += shape.value_heads * stride) {
    const float k_norm = norms[1], kept = *decay;
    Floats read[kVectorsHere] = {}, delta[kVectorsHere], answer[kVectorsHere] = {};
    for (int64_t row = 0; row < width; row++) {
      const Floats key = splat(k[row]);
      for (int i = 0; i < kVectorsHere; i++) read[i] += load<Floats>(s + row * stride + i * kLanes) * key;
    }
    for (int i = 0; i < kVectorsHere; i++)
      delta[i] = (load<Floats>(v + i * kLanes) - read[i] * (kept * k_norm)) * (*beta * k_norm);
    for (int64_t row = 0; row < width; row++) {
      const Floats key = splat(k[row]), query = splat(q[row]);
      for (int i = 0; i < kVectorsHere; i++) {
        float* place = s + row * stride + i * kLanes;
        const Floats next = load<Floats>(place) * kept + key * delta[i];
        store(place, next);
        answer[i] += next * query;
      }
    }
    for (int i = 0; i < kVectorsHere; i++) store_floats(out + i * kLanes, answer[i] * norms[0]);
  }
}

template <class Element>
void gated_delta(const Shape& shape, const Element* mixed, const float* weight, const float* decay, const float* beta,
                 char* states, float* scratch, Element* out, int threads) {
  const int64_t channels = shape.channels(), tokens = shape.tokens, keys = shape.key_heads * shape.key_width;
  const int64_t rows = shape.taps + 2 * tokens;  // of scratch for a sequence: history, then y
  float* norms = scratch + shape.sequences * rows * channels;  // [sequences, key_heads, tokens, 2]
  const int64_t parts = (channels + kChannels - 1) / kChannels;
  const int64_t groups = (shape.value_width + kColumns - 1) / kColumns;
  const int64_t items = shape.sequences * shape.value_heads * groups;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
#pragma omp for schedule(dynamic, 1)
    for (int64_t item = 0; item < shape.sequences * parts; item++) {
      const int64_t b = item / parts, first = item % parts * kChannels;
      float* history = scratch + b * rows * channels;
      convolve(shape, first, std::min(first + kChannels, channels), mixed + b * tokens * channels, weight,
               (Element*)(states + b * shape.state_bytes + shape.conv_offset), history,
               history + (shape.taps + tokens) * channels);
    }
#pragma omp for schedule(static)
    for (int64_t item = 0; item < shape.sequences * shape.key_heads * tokens; item++) {
      const int64_t t = item % tokens, head = item / tokens % shape.key_heads, b = item / tokens / shape.key_heads;
      const float* y = scratch + (b * rows + shape.taps + tokens + t) * channels + head * shape.key_width;
      norms[2 * item] = inverse_norm(y, shape.key_width) / std::sqrt((float)shape.key_width);
      norms[2 * item + 1] = inverse_norm(y + keys, shape.key_width);
    }
#pragma omp for schedule(dynamic, 1)
    for (int64_t item = 0; item < items; item++) {
      const int64_t column = item % groups * kColumns, head = item / groups % shape.value_heads;
      const int64_t b = item / groups / shape.value_heads;
      const int64_t key_head = head / (shape.value_heads / shape.key_heads);
      const float* y = scratch + (b * rows + shape.taps + tokens) * channels;
      const float *q = y + key_head * shape.key_width, *v = y + 2 * keys + head * shape.value_width + column;
      float* s = (float*)(states + b * shape.state_bytes + shape.delta_offset) +
                 head * shape.key_width * shape.value_width + column;
      const int64_t first = b * tokens * shape.value_heads + head;
      Element* target = out + first * shape.value_width + column;
      const float* own = norms + 2 * (b * shape.key_heads + key_head) * tokens;
      if (shape.value_width - column >= kColumns)
        recur<Element, 2>(shape, q, q + keys, v, decay + first, beta + first, own, s, target);
      else
        recur<Element, 1>(shape, q, q + keys, v, decay + first, beta + first, own, s, target);
    }
  }
}

}  // namespace

extern "C" {

// Columns and channels that the kernel takes at once: widths are multiples of it.
int64_t gated_delta_lanes() { return kLanes; }

void gated_delta_f32(const Shape* shape, const float* mixed, const float* weight, const float* decay, const float* beta,
                     char* states, float* scratch, float* out, int threads) {
  gated_delta(*shape, mixed, weight, decay, beta, states, scratch, out, threads);
}
void gated_delta_bf16(const Shape* shape, const BFloat16* mixed, const float* weight, const float* decay,
                      const float* beta, char* states, float* scratch, BFloat16* out, int threads) {
  gated_delta(*shape, mixed, weight, decay, beta, states, scratch, out, threads);
}
}
