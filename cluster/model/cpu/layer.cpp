// Decoder layers in one call: of each, y = h + mlp(norm(h)), h = x + attention(norm(x)), over packed tokens and paged K and
// V; then, where the caller wants logits, the model's last norm and its head.
//
// One team of threads goes through the phases of all layers in one OpenMP region (team.h). While a thread waits it fetches
// the weights of the next product.
//
// Sums and roundings are those of the kernels in linear.cpp, rows.cpp and attention.cpp: a row depends neither on the other
// rows nor on the number of threads. Plain C interface; the memory between the phases is kept per calling thread and reused.

#include <omp.h>

#include <vector>

#include "common.h"
#include "kernels.h"
#include "team.h"
#include "workspace.h"

extern "C" {
// The next five are mirrored by layer.py. What is fixed when a model is loaded; the layers of a call have the same shapes.
struct DecoderLayer {
  const Layer *qkv, *out, *gate_up, *down;  // qkv: query heads, then key heads, then value heads
  const void *input_norm, *post_norm;       // [hidden]
  const void *query_norm, *key_norm;        // [head_width] or null
  int64_t query_heads, kv_heads, head_width, is_bf16;
  double input_epsilon, post_epsilon, query_epsilon, key_epsilon, scale;
};

struct Decoder {
  const DecoderLayer* const* layers;
  const int64_t* views;  // [num_layers] which of the step's views the layer has
  int64_t num_layers;
  const void* norm;   // the last, [hidden]; null where there is no head
  const Layer* head;  // or null
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

using kernels::AttentionPlan;
using kernels::Product;

constexpr int64_t kFetched = 384 << 10;  // bytes of weights that a waiting thread fetches into its second-level cache
constexpr int64_t kNormRows = 4, kTokens = 4, kLogits = 1 << 13;  // of an item
// More than one thread for a call that takes one thread 0.14 ms or more, if a layer takes it 0.01 ms: to wake a thread takes
// 0.015 to 0.05 ms, and each phase waits for the slowest.
constexpr int64_t kLeastCall = 2 * kernels::kSerialWork, kLeastLayer = kernels::kSerialWork / 8;  // work of products

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
  Rows normed, attended, gated, last;
  char* qkv;
  char* down = nullptr;  // A x of one product

  Buffers(const Decoder& decoder, const DecoderStep& step, Workspace& workspace) {
    const DecoderLayer& layer = *decoder.layers[0];
    normed = rows_of(workspace, *layer.qkv, step.tokens, layer.is_bf16);
    attended = rows_of(workspace, *layer.out, step.tokens, layer.is_bf16);
    gated = rows_of(workspace, *layer.down, step.tokens, layer.is_bf16);
    qkv = workspace.take(step.tokens * layer.qkv->outputs * (layer.is_bf16 ? 2 : 4));
    if (step.num_runs) down = workspace.take(step.tokens * down_width(decoder) * (layer.is_bf16 ? 2 : 4));
    if (step.num_wanted) last = rows_of(workspace, *decoder.head, step.num_wanted, layer.is_bf16);
  }
};

// One layer of a step. The heads of a token lie behind each other in a row of `qkv`.
struct LayerCall {
  const DecoderLayer& layer;
  const DecoderStep& step;
  const Buffers& buffers;
  const void* x;
  const int64_t element_bytes, query_width, kv_width, qkv_width;
  const Product qkv, out, gate_up, down;
  const WriteCall key, value;
  const AttentionCall attention;

  LayerCall(const DecoderLayer& layer, const LayerRows& rows, const DecoderStep& step, const Buffers& buffers, const void* x)
      : layer(layer),
        step(step),
        buffers(buffers),
        x(x),
        element_bytes(layer.is_bf16 ? 2 : 4),
        query_width(layer.query_heads * layer.head_width),
        kv_width(layer.kv_heads * layer.head_width),
        qkv_width(query_width + 2 * kv_width),
        qkv(product(layer.qkv, buffers.normed, nullptr, buffers.qkv)),
        out(product(layer.out, buffers.attended, x, step.y)),
        gate_up(product(layer.gate_up, buffers.normed, nullptr, buffers.gated.data)),
        down(product(layer.down, buffers.gated, step.y, step.y)),
        key(write_call(query_width, rows.key, rows.key_scales)),
        value(write_call(query_width + kv_width, rows.value, rows.value_scales)),
        attention{buffers.qkv, rows.key, rows.key_scales, rows.value, rows.value_scales, nullptr, buffers.attended.data,
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
    kernels::rms_norm_rows(layer.is_bf16, weight, (const char*)rows + offset, normed.data + offset, count, normed.width,
                           epsilon);
    normed.quantise(first, count);
  }

  template <class Element>
  void turn_heads(int64_t token) const {
    const Element *cos = (const Element*)step.cos + token * step.rotary_width,
                  *sin = (const Element*)step.sin + token * step.rotary_width;
    Element* heads = (Element*)buffers.qkv + token * qkv_width;
    if (layer.query_norm)
      kernels::rms_norm_rows(layer.is_bf16, layer.query_norm, heads, heads, layer.query_heads, layer.head_width,
                             layer.query_epsilon);
    if (layer.key_norm)
      kernels::rms_norm_rows(layer.is_bf16, layer.key_norm, heads + query_width, heads + query_width, layer.kv_heads,
                             layer.head_width, layer.key_epsilon);
    for (int64_t head = 0; head < layer.query_heads + layer.kv_heads; head++)
      rotate(heads + head * layer.head_width, cos, sin, step.rotary_width);
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

// ------------------------------------------------------------------------------------------------------------ all layers

// The weights that this thread reads first.
Fetch fetch_of(const Product& product, const Member& member) {
  const int64_t items = product.items(), first = member.first_of(items), end = member.end_of(items);
  if (first >= end) return {};
  int64_t bytes;
  const char* weights = product.weights(first, &bytes);
  return {weights, weights + std::min(bytes * (end - first), kFetched)};
}

// What one thread of the team does in a call.
struct Runner {
  Member& member;
  const DecoderStep& step;
  const int64_t threads, row_items;

  void multiply(const Product& product, Fetch& next) {
    member.share(product.items(), next, [&](int64_t item) { product.run(item, 1); });
  }
  // Before `product` is multiplied: what adapters make of its rows.
  void add_down(const LayerCall& call, const Product& product, const Rows& rows, Fetch& next) {
    if (!product.batch.adapters.numbers) return;
    const int64_t pieces = call.pieces(), groups = product.layer->down_width / kernels::kDownRows;
    member.share(step.num_runs * pieces * groups, next, [&](int64_t item) { call.add_down(product, rows, pieces, item); });
  }
  void quantise(const Rows& rows, Fetch& next) {
    if (!rows.bytes) return;
    member.share(row_items, next, [&](int64_t item) {
      rows.quantise(item * kNormRows, std::min(kNormRows, step.tokens - item * kNormRows));
    });
  }
  void attend(const LayerCall& call, const AttentionStep& view, AttentionPlan& plan, Fetch& next) {
    const int64_t items = plan.items.size();
    member.share(items, next,
                 [&](int64_t item) { plan.run(view, call.attention, item, std::min(item + 1, items - 1)); });
    if (!plan.parts.empty()) member.share(items, next, [&](int64_t item) { plan.merge(call.attention, item); });
  }
  // `after`: the first product of what follows, or null.
  void run(const LayerCall& call, const AttentionStep& view, AttentionPlan& plan, const Product* after) {
    const DecoderLayer& layer = call.layer;
    Fetch qkv = fetch_of(call.qkv, member), out = fetch_of(call.out, member), gate_up = fetch_of(call.gate_up, member),
          down = fetch_of(call.down, member), next = after ? fetch_of(*after, member) : Fetch{};
    member.share(row_items, qkv, [&](int64_t item) { call.norm(layer.input_norm, call.x, layer.input_epsilon, item); });
    add_down(call, call.qkv, call.buffers.normed, qkv);
    multiply(call.qkv, out);
    member.share((step.tokens + kTokens - 1) / kTokens, out, [&](int64_t item) { call.place(item); });
    attend(call, view, plan, out);
    quantise(call.buffers.attended, out);
    add_down(call, call.out, call.buffers.attended, out);
    multiply(call.out, gate_up);
    member.share(row_items, gate_up, [&](int64_t item) { call.norm(layer.post_norm, step.y, layer.post_epsilon, item); });
    add_down(call, call.gate_up, call.buffers.normed, gate_up);
    multiply(call.gate_up, down);
    quantise(call.buffers.gated, down);
    add_down(call, call.down, call.buffers.gated, down);
    multiply(call.down, next);
  }
};

struct Call {
  const Decoder& decoder;
  const DecoderStep& step;
  const Buffers& buffers;
  std::vector<AttentionPlan>& plans;  // one for each view
  Team& team;
  const Product head;
  std::atomic<bool> stopped{false};

  Call(const Decoder& decoder, const DecoderStep& step, const Buffers& buffers, std::vector<AttentionPlan>& plans, Team& team)
      : decoder(decoder),
        step(step),
        buffers(buffers),
        plans(plans),
        team(team),
        head{decoder.head, step.num_wanted ? buffers.last.batch(step.num_wanted, nullptr) : kernels::Batch{}, step.outputs,
             decoder.layers[0]->is_bf16 != 0} {}

  LayerCall layer(int64_t i) const {
    return LayerCall(*decoder.layers[i], step.rows[i], step, buffers, i == 0 ? step.x : step.y);
  }

  int64_t threads() const {
    const int64_t layer_work = layer(0).work(), work = layer_work * decoder.num_layers;
    return work < kLeastCall || layer_work < kLeastLayer ? 1 : step.threads;
  }

  void run() {
    team.begin(threads());
#pragma omp parallel num_threads(team.threads()) if (team.threads() > 1)
    run_member(omp_get_thread_num());
  }

  void run_member(int64_t index) {
    Member member(team, index);
    Runner runner{member, step, team.threads(), (step.tokens + kNormRows - 1) / kNormRows};
    for (int64_t i = 0; i < decoder.num_layers; i++) {
      const bool is_last = i + 1 == decoder.num_layers;
      const LayerCall next = layer(is_last ? i : i + 1);
      const Product* after = !is_last ? &next.qkv : step.num_wanted ? &head : nullptr;
      const LayerCall call = layer(i);
      const int64_t view = decoder.views[i];
      runner.run(call, *step.views[view], plans[view], after);
      if (step.on_layer && !announce(member, i)) return;
    }
    if (step.num_wanted) run_head(runner);
  }

  bool announce(Member& member, int64_t layer) {
    Fetch nothing;
    member.leave_to_first(nothing, [&] { stopped.store(step.on_layer(layer) != 0); });
    return !stopped.load();
  }

  void run_head(Runner& runner) {
    Fetch weights = fetch_of(head, runner.member), nothing;
    const Rows& last = buffers.last;
    runner.member.share(step.num_wanted, weights, [&](int64_t row) {
      kernels::rms_norm_rows(last.is_bf16, decoder.norm, (const char*)step.y + step.wanted[row] * last.row_bytes(),
                             last.data + row * last.row_bytes(), 1, last.width, decoder.epsilon);
      last.quantise(row, 1);
    });
    runner.multiply(head, nothing);
    if (step.logits) widen_logits(runner.member);
  }

  void widen_logits(Member& member) {
    const int64_t count = step.num_wanted * decoder.head->outputs;
    const BFloat16* outputs = (const BFloat16*)step.outputs;
    Fetch nothing;
    member.share((count + kLogits - 1) / kLogits, nothing, [&](int64_t item) {
      const int64_t end = std::min((item + 1) * kLogits, count);
      for (int64_t i = item * kLogits; i < end; i += kLanes)
        store_some(step.logits + i, end - i, load_some(outputs + i, end - i));
    });
  }
};

}  // namespace

extern "C" {

// The caller checks widths as for `paged_attention`.
void run_decoder(const Decoder* decoder, DecoderStep* step) {
  static thread_local std::vector<char> memory;
  static thread_local std::vector<AttentionPlan> plans;
  static thread_local Team team;
  Workspace workspace = workspace_for(memory, [&](Workspace& sizes) { Buffers(*decoder, *step, sizes); });
  const Buffers buffers(*decoder, *step, workspace);
  const LayerCall any(*decoder->layers[0], step->rows[0], *step, buffers, step->x);
  plans.resize(step->num_views);
  for (int64_t view = 0; view < step->num_views; view++) plans[view].make(*step->views[view], any.attention);
  Call(*decoder, *step, buffers, plans, team).run();
  step->busy = team.busy() / team.threads();
}
}
