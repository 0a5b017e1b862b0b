// One decoder layer of a step: its products, and the pieces of work between them. Who runs them when is in layer.cpp.

#pragma once

#include "common.h"
#include "kernels.h"
#include "workspace.h"

extern "C" {
// The next five are mirrored by layer.py. What is fixed when a model is loaded. Layers of one kind, with attention or a mixer,
// have the same shapes.
struct DecoderLayer {
  const Layer *qkv, *out, *gate_up, *down;  // qkv: query heads, key heads, value heads, gates; or what the mixer reads
  const void *input_norm, *post_norm;       // [hidden]
  const void *query_norm, *key_norm;        // [head_width] or null
  const Mixer* mixer;                       // or null: attention
  int64_t query_heads, kv_heads, head_width, is_bf16;
  int64_t is_gated, is_shifted;             // what attention gives is multiplied by sigmoid(gates); form of the norms
  double input_epsilon, post_epsilon, query_epsilon, key_epsilon, scale;
};

struct Decoder {
  const DecoderLayer* const* layers;
  const int64_t* views;  // [num_layers] which of the step's views the layer has
  int64_t num_layers;
  const void* norm;   // the last, [hidden]; null where there is no head
  const Layer* head;  // or null
  int64_t is_shifted;
  double epsilon;
};

// Where a layer keeps K and V.
struct LayerRows {
  void *key, *key_scales, *value, *value_scales;
};

// Tokens with one adapter: [begin, end) of a list that is sorted by adapter.
struct AdapterRun { int64_t begin, end, adapter; };

struct DecoderStep {
  const int64_t* slots;                 // [tokens]
  const void *cos, *sin;                // [tokens, rotary_width]; channels behind rotary_width are not turned
  const LayerRows* rows;                // [num_layers]
  const AttentionStep* const* views;    // [num_views]
  const MixerStep* mixing;              // or null: no layer has a mixer
  const void* x;                        // [tokens, hidden]
  void* y;                              // [tokens, hidden], what the last layer gives; may be x
  const int64_t* wanted;                // [num_wanted] tokens, of which the head makes
  void* outputs;                        // [num_wanted, outputs of the head], rounded as the other products are
  float* logits;                        // the same in float32; null where `outputs` are
  int64_t tokens, rotary_width, num_views, num_wanted, threads;
  int (*on_layer)(int64_t layer);       // or null; called by the calling thread when a layer has run. Not 0: stop there
  const int32_t* adapters;              // [tokens] numbers, or 0
  const int64_t* adapted;               // tokens with an adapter, sorted by it
  const AdapterRun* runs;               // [num_runs] of `adapted`
  int64_t num_runs;                     // 0: no token has an adapter
  int64_t busy;                         // set by the call: nanoseconds of each thread in kernels, on average
};
}

namespace {

using kernels::Product;

constexpr int64_t kNormRows = 4, kTokens = 4;  // of an item

// ------------------------------------------------------------------------------------------------- rows between products

// Rotates the pairs (i, i + width / 2) of one head, rounding where torch does.
template <class Element>
void rotate(Element* head, const Element* cos, const Element* sin, int64_t width) {
  const int64_t half = width / 2;
  for (int64_t i = 0; i < half; i += kLanes) {
    const int64_t count = half - i;
    const Floats low = load_some(head + i, count), high = load_some(head + half + i, count);
    const Floats low_cos = rounded<Element>(low * load_some(cos + i, count));
    const Floats high_cos = rounded<Element>(high * load_some(cos + half + i, count));
    store_some(head + i, count, low_cos - rounded<Element>(high * load_some(sin + i, count)));
    store_some(head + half + i, count, high_cos + rounded<Element>(low * load_some(sin + half + i, count)));
  }
}

// Rows that go into a product, and their quantised form where its weights are int8.
struct Rows {
  char* data;
  uint8_t* bytes;
  float* scales;
  int64_t width, quantised_width;
  bool is_bf16;

  int64_t row_bytes() const { return width * (is_bf16 ? 2 : 4); }
  void quantise(int64_t row, int64_t rows) const {
    if (bytes)
      kernels::quantise_rows(is_bf16, data + row * row_bytes(), bytes + row * quantised_width, scales + row, rows, width,
                             quantised_width);
  }
  kernels::Batch batch(int64_t rows, const void* residual) const {
    if (bytes) return {(const char*)bytes, quantised_width, scales, rows, residual};
    return {data, row_bytes(), nullptr, rows, residual};
  }
};

Rows rows_of(Workspace& workspace, const Layer& layer, int64_t count, bool is_bf16) {
  const int64_t width = layer.inputs, quantised_width = (width + 3) / 4 * 4;
  Rows rows{workspace.take(count * width * (is_bf16 ? 2 : 4)), nullptr, nullptr, width, quantised_width, is_bf16};
  if (!layer.scales) return rows;
  rows.bytes = (uint8_t*)workspace.take(count * quantised_width);
  rows.scales = (float*)workspace.take(count * sizeof(float));
  return rows;
}

// ----------------------------------------------------------------------------------------------------------- a layer

// Null: there is none.
const DecoderLayer* first_of(const Decoder& decoder, bool has_mixer) {
  for (int64_t i = 0; i < decoder.num_layers; i++)
    if ((decoder.layers[i]->mixer != nullptr) == has_mixer) return decoder.layers[i];
  return nullptr;
}

int64_t down_width(const Decoder& decoder) {
  int64_t widest = 0;
  for (int64_t i = 0; i < decoder.num_layers; i++) {
    const DecoderLayer& layer = *decoder.layers[i];
    for (const Layer* weights : {layer.qkv, layer.out, layer.gate_up, layer.down})
      widest = std::max(widest, weights->down_width);
  }
  return widest;
}

struct Buffers {
  Rows normed, gated, last;
  Rows attended[2];  // [1]: of mixers
  char* qkv;
  char* down = nullptr;  // A x of one product

  Buffers(const Decoder& decoder, const DecoderStep& step, Workspace& workspace) {
    const DecoderLayer& layer = *decoder.layers[0];
    normed = rows_of(workspace, *layer.qkv, step.tokens, layer.is_bf16);
    gated = rows_of(workspace, *layer.down, step.tokens, layer.is_bf16);
    int64_t widest = 0;
    for (const bool has_mixer : {false, true})
      if (const DecoderLayer* first = first_of(decoder, has_mixer)) {
        attended[has_mixer] = rows_of(workspace, *first->out, step.tokens, layer.is_bf16);
        widest = std::max(widest, first->qkv->outputs);
      }
    qkv = workspace.take(step.tokens * widest * (layer.is_bf16 ? 2 : 4));
    if (step.num_runs) down = workspace.take(step.tokens * down_width(decoder) * (layer.is_bf16 ? 2 : 4));
    if (step.num_wanted) last = rows_of(workspace, *decoder.head, step.num_wanted, layer.is_bf16);
  }
};

// One layer of a step. The heads of a token lie behind each other in a row of `qkv`.
struct LayerCall {
  const DecoderLayer& layer;
  const DecoderStep& step;
  const Buffers& buffers;
  const Rows& attended;
  const void* x;
  const int64_t element_bytes, query_width, kv_width, qkv_width;
  const Product qkv, out, gate_up, down;
  const WriteCall key, value;
  const AttentionCall attention;

  LayerCall(const DecoderLayer& layer, const LayerRows& rows, const DecoderStep& step, const Buffers& buffers, const void* x)
      : layer(layer),
        step(step),
        buffers(buffers),
        attended(buffers.attended[layer.mixer != nullptr]),
        x(x),
        element_bytes(layer.is_bf16 ? 2 : 4),
        query_width(layer.query_heads * layer.head_width),
        kv_width(layer.kv_heads * layer.head_width),
        qkv_width(layer.qkv->outputs),
        qkv(product(layer.qkv, buffers.normed, nullptr, buffers.qkv)),
        out(product(layer.out, attended, x, step.y)),
        gate_up(product(layer.gate_up, buffers.normed, nullptr, buffers.gated.data)),
        down(product(layer.down, buffers.gated, step.y, step.y)),
        key(write_call(query_width, rows.key, rows.key_scales)),
        value(write_call(query_width + kv_width, rows.value, rows.value_scales)),
        attention{buffers.qkv, rows.key, rows.key_scales, rows.value, rows.value_scales, nullptr, attended.data,
                  qkv_width, layer.head_width, layer.query_heads, layer.kv_heads, layer.head_width, layer.head_width,
                  layer.is_bf16, layer.scale, 0} {}

  Product product(const Layer* weights, const Rows& rows, const void* residual, void* y) const {
    kernels::Batch batch = rows.batch(step.tokens, residual);
    if (step.num_runs && weights->adapters) batch.adapters = {step.adapters, buffers.down};
    return {weights, batch, y, layer.is_bf16 != 0};
  }

  // Pieces of the longest run, of kRunRows rows each.
  int64_t pieces() const {
    int64_t most = 0;
    for (int64_t run = 0; run < step.num_runs; run++) most = std::max(most, step.runs[run].end - step.runs[run].begin);
    return (most + kernels::kRunRows - 1) / kernels::kRunRows;
  }

  // A x of one piece of a run, by one group of A.
  void add_down(const Product& product, const Rows& rows, int64_t pieces, int64_t item) const {
    const Layer& weights = *product.layer;
    const int64_t groups = weights.down_width / kernels::kDownRows, group = item % groups, piece = item / groups % pieces;
    const AdapterRun& run = step.runs[item / groups / pieces];
    const int64_t begin = run.begin + piece * kernels::kRunRows, count = std::min(run.end - begin, kernels::kRunRows);
    if (count > 0)
      kernels::adapter_down(layer.is_bf16, weights, weights.adapters[run.adapter - 1], rows.data, step.adapted + begin, count,
                            group, buffers.down);
  }

  WriteCall write_call(int64_t column, void* target, void* scales) const {
    return {buffers.qkv + column * element_bytes, step.slots, target, scales, step.tokens, layer.kv_heads,
            layer.head_width, qkv_width, layer.head_width, layer.is_bf16, 1};
  }

  int64_t work() const { return qkv.work() + out.work() + gate_up.work() + down.work(); }

  void norm(const void* weight, const void* rows, double epsilon, int64_t item) const {
    const Rows& normed = buffers.normed;
    const int64_t first = item * kNormRows, count = std::min(kNormRows, step.tokens - first);
    const int64_t offset = first * normed.row_bytes();
    kernels::rms_norm_rows(layer.is_bf16, layer.is_shifted, weight, (const char*)rows + offset, normed.data + offset, count, normed.width,
                           epsilon);
    normed.quantise(first, count);
  }

  template <class Element>
  void turn_heads(int64_t token) const {
    const Element *cos = (const Element*)step.cos + token * step.rotary_width,
                  *sin = (const Element*)step.sin + token * step.rotary_width;
    Element* heads = (Element*)buffers.qkv + token * qkv_width;
    if (layer.query_norm)
      kernels::rms_norm_rows(layer.is_bf16, layer.is_shifted, layer.query_norm, heads, heads, layer.query_heads, layer.head_width,
                             layer.query_epsilon);
    if (layer.key_norm)
      kernels::rms_norm_rows(layer.is_bf16, layer.is_shifted, layer.key_norm, heads + query_width, heads + query_width, layer.kv_heads,
                             layer.head_width, layer.key_epsilon);
    for (int64_t head = 0; head < layer.query_heads + layer.kv_heads; head++)
      rotate(heads + head * layer.head_width, cos, sin, step.rotary_width);
  }

  // What attention gave of some rows, as the product after it takes them.
  void finish_attended(int64_t item) const {
    const int64_t first = item * kNormRows, count = std::min(kNormRows, step.tokens - first);
    for (int64_t token = first; layer.is_gated && token < first + count; token++)
      layer.is_bf16 ? gate_heads<BFloat16>(token) : gate_heads<float>(token);
    attended.quantise(first, count);
  }

  template <class Element>
  void gate_heads(int64_t token) const {
    const Element* gates = (const Element*)buffers.qkv + token * qkv_width + query_width + 2 * kv_width;
    Element* row = (Element*)attended.data + token * query_width;
    for (int64_t i = 0; i < query_width; i += kLanes) {
      const int64_t count = query_width - i;
      const Floats gate = rounded<Element>(1.0f / (exp_of(-load_some(gates + i, count)) + 1.0f));
      store_some(row + i, count, load_some(row + i, count) * gate);
    }
  }

  // Query and key heads of some tokens turned in place, K and V into their blocks.
  void place(int64_t item) const {
    const int64_t first = item * kTokens, end = std::min(first + kTokens, step.tokens);
    for (int64_t token = first; token < end; token++)
      layer.is_bf16 ? turn_heads<BFloat16>(token) : turn_heads<float>(token);
    kernels::write_kv_rows(key, first, end);
    kernels::write_kv_rows(value, first, end);
  }
};

}  // namespace
