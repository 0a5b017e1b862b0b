// Passes over rows of activations between products: RMS norms, and the quantised rows that products of int8 weights take.

#include <cmath>
#include <cstring>

#include "common.h"
#include "kernels.h"

namespace {

using kernels::kSerialElements;

typedef uint8_t UnsignedBytes __attribute__((vector_size(kLanes), may_alias));

// x ≈ scale * (byte - 128); returns the scale. Bytes behind `width` stay as they are.
template <class Element>
float quantise_row(const Element* x, uint8_t* bytes, int64_t width) {
  Floats largest = {};
  float peak = 0;
  int64_t k = 0;
  for (; k + kLanes <= width; k += kLanes) {
    Floats value = widened(x + k), size = value < 0.0f ? -value : value;
    largest = size > largest ? size : largest;
  }
  for (int lane = 0; lane < kLanes; lane++) peak = std::max(peak, largest[lane]);
  for (int64_t i = k; i < width; i++) peak = std::max(peak, std::fabs(as_float(x[i])));
  const float scale = peak > 0 ? peak / 127.0f : 1.0f, inverse = 1.0f / scale;
  const float magic = 12582912.0f;
  for (k = 0; k + kLanes <= width; k += kLanes) {
    Floats shifted = widened(x + k) * inverse + (magic + 128.0f);
    store(bytes + k, __builtin_convertvector((Words)shifted & 0xffu, UnsignedBytes));
  }
  for (; k < width; k++) bytes[k] = (uint8_t)(std::nearbyint(as_float(x[k]) * inverse) + 128.0f);
  return scale;
}

// --------------------------------------------------------------------------------------------------------------- norms

// y = weight * Element(x / sqrt(mean(x²) + epsilon)); shifted: Element((1 + weight) * x / sqrt(mean(x²) + epsilon))
template <bool kIsShifted, class Element>
inline Floats weighted(Floats normed, const Element* weight) {
  if constexpr (kIsShifted) return normed * (widened(weight) + 1.0f);
  return rounded<Element>(normed) * widened(weight);
}

template <bool kIsShifted, class Element>
void rms_norm_row(const Element* weight, const Element* x, Element* y, int64_t width, float epsilon) {
  Floats squares[4] = {};
  int64_t k = 0;
  for (; k + 4 * kLanes <= width; k += 4 * kLanes)
    for (int v = 0; v < 4; v++) {
      Floats value = widened(x + k + v * kLanes);
      squares[v] += value * value;
    }
  float sum = sum_of((squares[0] + squares[1]) + (squares[2] + squares[3]));
  for (; k < width; k++) sum += as_float(x[k]) * as_float(x[k]);
  const float scale = 1.0f / std::sqrt(sum / (float)width + epsilon);
  for (k = 0; k + kLanes <= width; k += kLanes) store_floats(y + k, weighted<kIsShifted>(widened(x + k) * scale, weight + k));
  if (k == width) return;
  Element tail[3][kLanes] = {};
  std::memcpy(tail[0], x + k, (width - k) * sizeof(Element));
  std::memcpy(tail[1], weight + k, (width - k) * sizeof(Element));
  store_floats(tail[2], weighted<kIsShifted>(widened(tail[0]) * scale, tail[1]));
  std::memcpy(y + k, tail[2], (width - k) * sizeof(Element));
}

template <class Element>
void rms_norm(bool is_shifted, const Element* weight, const Element* x, Element* y, int64_t rows, int64_t width, float epsilon,
              int threads) {
  const auto norm_row = is_shifted ? rms_norm_row<true, Element> : rms_norm_row<false, Element>;
#pragma omp parallel for schedule(dynamic, 16) num_threads(threads) if (threads > 1 && rows * width > kSerialElements)
  for (int64_t row = 0; row < rows; row++) norm_row(weight, x + row * width, y + row * width, width, epsilon);
}

}  // namespace

namespace kernels {

void rms_norm_rows(bool is_bf16, bool is_shifted, const void* weight, const void* x, void* y, int64_t rows, int64_t width,
                   float epsilon) {
  if (is_bf16)
    rms_norm(is_shifted, (const BFloat16*)weight, (const BFloat16*)x, (BFloat16*)y, rows, width, epsilon, 1);
  else
    rms_norm(is_shifted, (const float*)weight, (const float*)x, (float*)y, rows, width, epsilon, 1);
}

void quantise_rows(bool is_bf16, const void* x, uint8_t* bytes, float* scales, int64_t rows, int64_t width,
                   int64_t x_bytes) {
  for (int64_t row = 0; row < rows; row++, bytes += x_bytes)
    scales[row] = is_bf16 ? quantise_row((const BFloat16*)x + row * width, bytes, width)
                          : quantise_row((const float*)x + row * width, bytes, width);
}

}  // namespace kernels

extern "C" {

void rms_norm_f32(const float* weight, const float* x, float* y, int64_t rows, int64_t width, float epsilon, int is_shifted,
                  int threads) {
  rms_norm(is_shifted, weight, x, y, rows, width, epsilon, threads);
}
void rms_norm_bf16(const BFloat16* weight, const BFloat16* x, BFloat16* y, int64_t rows, int64_t width, float epsilon,
                   int is_shifted, int threads) {
  rms_norm(is_shifted, weight, x, y, rows, width, epsilon, threads);
}
}
