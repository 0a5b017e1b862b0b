// A block of a vision or audio encoder in one call: y = h + mlp(norm(h)), h = x + attention(norm(x)), over packed rows.
//
// Rows attend to all rows of their own sequence and to no others. Q and K may be rotated. Norms are RMS or layer norms; the
// MLP is gated, or has an activation between two linears. K and V are copied into blocks for the kernels of attention.cpp:
// each sequence begins a block, so that a row's sums do not depend on the sequences before its own.
//
// One team of threads goes through the phases in one OpenMP region (team.h). A row's result depends neither on other
// sequences nor on the number of threads. The memory between the phases is kept per calling thread and
// reused.

#include <omp.h>

#include <cmath>
#include <vector>

#include "attention_tiles.h"
#include "common.h"
#include "kernels.h"
#include "team.h"
#include "workspace.h"

extern "C" {
// The next two are mirrored by encoder_layer.py. What is fixed when a model is loaded.
struct EncoderLayer {
  const Layer *qkv, *out, *up, *down;  // qkv: query heads, then key heads, then value heads
  const void *attention_norm, *attention_shift, *mlp_norm, *mlp_shift;  // [hidden]; shifts: null for RMS norms
  int64_t heads, head_width, activation, is_bf16;
  double attention_epsilon, mlp_epsilon, scale;
};

// The same for all blocks of a tower that attend to the same sequences.
struct EncoderStep {
  const int32_t* starts;   // [sequences + 1] first row of each sequence
  const uint8_t* visible;  // [rows] whether other rows see this one; null: all are seen
  const float *cos, *sin;  // [rows, head_width]; null: no rotation
  int64_t sequences, rows, threads;
};
}

namespace {

using kernels::Product;

enum Activation : int64_t { kGated, kGelu, kGeluTanh, kQuickGelu };  // mirrored by encoder_layer.py

constexpr int64_t kBlockSize = 16;  // rows of K and V; a sequence leaves less than a block empty
constexpr int64_t kItemRows = 4;    // of a pass over rows

// ---------------------------------------------------------------------------------------------------------- activations

inline Floats sigmoid(Floats x) { return 1.0f / (1.0f + power_of_two<false>(larger(splat(-60), -x) * kLog2E)); }

// erf after Abramowitz and Stegun, 7.1.26: absolute error below 2e-7.
inline Floats gelu(Floats x) {
  const Floats z = larger(x, -x) * 0.70710678f, t = 1.0f / (1.0f + 0.3275911f * z);
  Floats p = (1.061405429f * t - 1.453152027f) * t + 1.421413741f;
  p = ((p * t - 0.284496736f) * t + 0.254829592f) * t;
  const Floats tail = 0.5f * p * power_of_two<false>(larger(splat(-100), -z * z) * kLog2E);  // of the normal distribution
  return x * (x < 0.0f ? tail : 1.0f - tail);
}

inline Floats activated(Floats x, int64_t activation) {
  if (activation == kGelu) return gelu(x);
  if (activation == kQuickGelu) return x * sigmoid(1.702f * x);
  return x * sigmoid(1.59576912f * (x + 0.044715f * x * x * x));  // gelu with tanh: 2 * sqrt(2 / pi)
}

template <class Element>
void activate(Element* values, int64_t count, int64_t activation) {
  for (int64_t i = 0; i < count; i += kLanes)
    store_some(values + i, count - i, activated(load_some(values + i, count - i), activation));
}

// ------------------------------------------------------------------------------------------------------------------ rows

template <class Element>
void layer_norm(const Element* weight, const Element* shift, const Element* x, Element* y, int64_t width, float epsilon) {
  Floats sums = {}, squares = {};
  for (int64_t i = 0; i < width; i += kLanes) sums += load_some(x + i, width - i);
  const Floats mean = splat(sum_of(sums) / (float)width);
  for (int64_t i = 0; i < width; i += kLanes) {
    Floats distance = load_some(x + i, width - i) - mean;
    for (int64_t lane = width - i; lane < kLanes; lane++) distance[lane] = 0;
    squares += distance * distance;
  }
  const float scale = 1.0f / std::sqrt(sum_of(squares) / (float)width + epsilon);
  for (int64_t i = 0; i < width; i += kLanes) {
    const int64_t count = width - i;
    const Floats value = (load_some(x + i, count) - mean) * scale;
    store_some(y + i, count, value * load_some(weight + i, count) + load_some(shift + i, count));
  }
}

// Rotates the pairs (i, i + width / 2) of one head; rounds once.
template <class Element>
void rotate(const Element* head, const float* cos, const float* sin, Element* target, int64_t width) {
  const int64_t half = width / 2;
  for (int64_t i = 0; i < half; i += kLanes) {
    const int64_t count = half - i;
    const Floats low = load_some(head + i, count), high = load_some(head + half + i, count);
    store_some(target + i, count, low * load_some(cos + i, count) - high * load_some(sin + i, count));
    store_some(target + half + i, count,
               high * load_some(cos + half + i, count) + low * load_some(sin + half + i, count));
  }
}

// --------------------------------------------------------------------------------------------------------------- a call

// Where K and V of the rows lie, and what each row sees of its sequence.
struct Places {
  std::vector<int64_t> slots, tables;  // slots: -1 for a row that is not seen
  std::vector<int32_t> begins, ends;
  int64_t num_slots = 0, table_width = 0;

  explicit Places(const EncoderStep& step) : slots(step.rows), begins(step.rows), ends(step.rows) {
    std::vector<int64_t> first_blocks;
    for (int64_t sequence = 0; sequence < step.sequences; sequence++) {
      const int64_t first = step.starts[sequence], end = step.starts[sequence + 1];
      const bool all = !step.visible || !std::memchr(step.visible + first, 1, end - first);  // none: as if all were seen
      int64_t seen = 0;
      for (int64_t row = first; row < end; row++) slots[row] = all || step.visible[row] ? num_slots + seen++ : -1;
      std::fill(ends.begin() + first, ends.begin() + end, (int32_t)seen);
      const int64_t blocks = (seen + kBlockSize - 1) / kBlockSize;
      first_blocks.push_back(num_slots / kBlockSize);
      table_width = std::max(table_width, blocks);
      num_slots += blocks * kBlockSize;
    }
    for (const int64_t block : first_blocks)
      for (int64_t i = 0; i < table_width; i++) tables.push_back(block + i);
  }
};

struct Call {
  const EncoderLayer& layer;
  const EncoderStep& step;
  const Places& places;
  const char* x;
  char* y;
  int64_t rows, element_bytes, hidden, inner;  // inner: width between q/k/v and the projection
  char *normed, *qkv, *attended, *key, *value, *up;

  Call(const EncoderLayer& layer, const EncoderStep& step, const Places& places, const void* x, void* y, Workspace& workspace)
      : layer(layer), step(step), places(places), x((const char*)x), y((char*)y), rows(step.rows),
        element_bytes(layer.is_bf16 ? 2 : 4), hidden(layer.qkv->inputs), inner(layer.heads * layer.head_width) {
    const int64_t kv_bytes = places.num_slots * inner * element_bytes;
    normed = workspace.take(rows * hidden * element_bytes);
    qkv = workspace.take(rows * 3 * inner * element_bytes);
    attended = workspace.take(rows * inner * element_bytes);
    key = workspace.take(kv_bytes);
    value = workspace.take(kv_bytes);
    up = workspace.take(rows * layer.down->inputs * element_bytes);
  }

  Product product(const Layer* weights, const char* source, void* target, const void* residual) const {
    return {weights, {source, weights->inputs * element_bytes, nullptr, rows, residual}, target, layer.is_bf16 != 0};
  }

  template <class Element>
  void norm(const void* weight, const void* shift, double epsilon, const char* source, int64_t row) const {
    const Element* from = (const Element*)source + row * hidden;
    Element* to = (Element*)normed + row * hidden;
    if (shift)
      layer_norm((const Element*)weight, (const Element*)shift, from, to, hidden, epsilon);
    else
      kernels::rms_norm_rows(layer.is_bf16, false, weight, from, to, 1, hidden, epsilon);
  }

  // Query heads turned in place; K, turned, and V into their slots.
  template <class Element>
  void place(int64_t row) const {
    const int64_t width = layer.head_width, slot = places.slots[row];
    Element *query = (Element*)qkv + row * 3 * inner, *from = query + inner, *to = (Element*)key + slot * inner;
    if (step.cos) {
      const float *cos = step.cos + row * width, *sin = step.sin + row * width;
      for (int64_t head = 0; head < inner; head += width) {
        rotate(query + head, cos, sin, query + head, width);
        if (slot >= 0) rotate(from + head, cos, sin, to + head, width);
      }
    } else if (slot >= 0) {
      std::memcpy(to, from, inner * sizeof(Element));
    }
    if (slot >= 0) std::memcpy((Element*)value + slot * inner, from + inner, inner * sizeof(Element));
  }

  AttentionCall attention() const {
    const int64_t heads = layer.heads, width = layer.head_width;
    return {qkv,   key,   nullptr, value, nullptr, nullptr,       attended,    3 * inner, width,
            heads, heads, width,   width, layer.is_bf16, layer.scale, 0};
  }
};

template <class Element>
void run(const Call& call, Team& team) {
  const EncoderLayer& layer = call.layer;
  const int64_t rows = call.rows, inner_rows = layer.down->inputs;
  const Product qkv = call.product(layer.qkv, call.normed, call.qkv, nullptr);
  const Product out = call.product(layer.out, call.attended, call.y, call.x);
  const Product up = call.product(layer.up, call.normed, call.up, nullptr);
  const Product down = call.product(layer.down, call.up, call.y, call.y);
  const AttentionCall attention = call.attention();
  const AttentionStep sequences{call.places.tables.data(), call.step.starts, call.places.begins.data(),
                                call.places.ends.data(), call.step.sequences, call.places.table_width, kBlockSize,
                                call.step.threads};
  kernels::AttentionPlan plan(sequences, attention);
  const int64_t attentions = plan.items.size();
  const int64_t work = qkv.work() + out.work() + up.work() + down.work();
  team.begin(work < kernels::kSerialWork ? 1 : call.step.threads);
#pragma omp parallel num_threads(team.threads()) if (team.threads() > 1)
  {
    Member member(team, omp_get_thread_num());
    const auto share = [&](int64_t items, auto run_item) {
      Fetch nothing;
      member.share(items, nothing, run_item);
    };
    const auto share_rows = [&](auto each) {
      share((rows + kItemRows - 1) / kItemRows, [&](int64_t item) {
        for (int64_t row = item * kItemRows; row < std::min(rows, (item + 1) * kItemRows); row++) each(row);
      });
    };
    const auto multiply = [&](const Product& product) {
      share(product.items(), [&](int64_t item) { product.run(item, 1); });
    };
    share_rows([&](int64_t row) {
      call.norm<Element>(layer.attention_norm, layer.attention_shift, layer.attention_epsilon, call.x, row);
    });
    multiply(qkv);
    share_rows([&](int64_t row) { call.place<Element>(row); });
    share(attentions, [&](int64_t item) {
      plan.run(sequences, attention, item, std::min(item + 1, attentions - 1));
    });
    if (!plan.parts.empty()) share(attentions, [&](int64_t item) { plan.merge(attention, item); });
    multiply(out);
    share_rows([&](int64_t row) {
      call.norm<Element>(layer.mlp_norm, layer.mlp_shift, layer.mlp_epsilon, call.y, row);
    });
    multiply(up);
    if (layer.activation != kGated)
      share_rows([&](int64_t row) {
        activate((Element*)call.up + row * inner_rows, inner_rows, layer.activation);
      });
    multiply(down);
  }
}

}  // namespace

extern "C" {

// x and y: [rows, hidden], apart from each other. Head widths are even and at most 256; rows of bfloat16 are even in width.
void encoder_layer(const EncoderLayer* layer, const EncoderStep* step, const void* x, void* y) {
  static thread_local std::vector<char> memory;
  static thread_local Team team;
  const Places places(*step);
  Workspace workspace = workspace_for(memory, [&](Workspace& sizes) { Call(*layer, *step, places, x, y, sizes); });
  const Call call(*layer, *step, places, x, y, workspace);
  layer->is_bf16 ? run<BFloat16>(call, team) : run<float>(call, team);
}
}
