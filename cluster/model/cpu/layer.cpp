// A decoder layer in one call: y = h + mlp(norm(h)), h = x + attention(norm(x)), over packed tokens and paged K and V.
//
// One team of threads goes through the phases below. A thread that is free takes the next item of the phase. A phase ends
// when its items are done, not when all threads have arrived: a thread that loses its core between two items delays no
// other, and finds later that the phases it missed are over. While a thread waits it prefetches the next weights.
//
// Sums and roundings are those of the kernels in linear.cpp, rows.cpp and attention.cpp: a row depends neither on the other rows nor
// on the number of threads. Plain C interface; the memory between the phases is kept per calling thread and reused.

#include <omp.h>
#include <sched.h>

#include <atomic>
#include <vector>

#include "common.h"
#include "kernels.h"

extern "C" {
// Mirrored by layer.py. What is fixed when a model is loaded.
struct DecoderLayer {
  const Layer *qkv, *out, *gate_up, *down;  // qkv: query heads, then key heads, then value heads
  const void *input_norm, *post_norm;       // [hidden]
  const void *query_norm, *key_norm;        // [head_width] or null
  int64_t query_heads, kv_heads, head_width, is_bf16;
  double input_epsilon, post_epsilon, query_epsilon, key_epsilon, scale;
};

// The same for all layers of a step.
struct LayerStep {
  const int64_t* slots;      // [tokens]
  const void *cos, *sin;     // [tokens, rotary_width]; channels behind rotary_width are not turned
  int64_t tokens, rotary_width;
};
}

namespace {

using kernels::Product;

constexpr int kSpins = 4000;             // of a waiting thread before it offers its core to others
constexpr int64_t kFetched = 384 << 10;  // bytes of weights that a waiting thread fetches into its second-level cache
constexpr int64_t kNormRows = 4, kTokens = 4;  // of an item

// ---------------------------------------------------------------------------------------------------- phases and threads

struct alignas(64) Phase {
  std::atomic<int64_t> next{0}, done{0};
};

// Fetches what a thread is likely to read first when it goes on, a little at a time.
struct Fetch {
  const char *next = nullptr, *end = nullptr;

  Fetch(const Product& product, int64_t thread) {
    if (thread >= product.items()) return;
    int64_t bytes;
    next = product.weights(thread, &bytes);
    end = next + std::min(bytes, kFetched);
  }
  bool some() {
    if (next >= end) return false;
    for (int line = 0; line < 4; line++, next += 64) _mm_prefetch(next, _MM_HINT_T1);
    return true;
  }
};

// Runs items of the phase until none is left, then waits for those that other threads still run.
template <class Work>
void share(Phase& phase, int64_t items, Fetch& fetch, Work work) {
  int64_t own = 0;
  for (int64_t item; (item = phase.next.fetch_add(1, std::memory_order_relaxed)) < items; own++) work(item);
  if (own) phase.done.fetch_add(own, std::memory_order_release);
  for (int spins = 0; phase.done.load(std::memory_order_acquire) != items;) {
    if (fetch.some()) continue;
    if (spins++ < kSpins)
      _mm_pause();
    else
      sched_yield();
  }
}

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

// Pieces of one block of memory, each at the start of a cache line. Without memory it only adds up what they take.
struct Workspace {
  char* memory;
  int64_t taken = 0;

  char* take(int64_t bytes) {
    char* piece = memory + taken;
    taken += (bytes + 63) / 64 * 64;
    return memory ? piece : nullptr;
  }
  Rows rows(const Layer& layer, int64_t count, bool is_bf16) {
    const int64_t width = layer.inputs, quantised_width = (width + 3) / 4 * 4;
    Rows rows{take(count * width * (is_bf16 ? 2 : 4)), nullptr, nullptr, width, quantised_width, is_bf16};
    if (!layer.scales) return rows;
    rows.bytes = (uint8_t*)take(count * quantised_width);
    rows.scales = (float*)take(count * sizeof(float));
    return rows;
  }
};

// --------------------------------------------------------------------------------------------------------------- a call

// The heads of a token lie behind each other in a row of `qkv`.
struct Call {
  const DecoderLayer& layer;
  const LayerStep& step;
  const void* x;
  char* y;
  Rows normed, attended, gated;
  char* qkv;
  int64_t element_bytes, query_width, kv_width, qkv_width;

  Call(const DecoderLayer& layer, const LayerStep& step, const void* x, void* y, Workspace& workspace)
      : layer(layer), step(step), x(x), y((char*)y) {
    element_bytes = layer.is_bf16 ? 2 : 4;
    query_width = layer.query_heads * layer.head_width;
    kv_width = layer.kv_heads * layer.head_width;
    qkv_width = query_width + 2 * kv_width;
    normed = workspace.rows(*layer.qkv, step.tokens, layer.is_bf16);
    attended = workspace.rows(*layer.out, step.tokens, layer.is_bf16);
    gated = workspace.rows(*layer.down, step.tokens, layer.is_bf16);
    qkv = workspace.take(step.tokens * qkv_width * element_bytes);
  }

  void norm(const void* weight, const void* rows, double epsilon, int64_t item) const {
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
    Element* heads = (Element*)qkv + token * qkv_width;
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
  void place(const WriteCall& key, const WriteCall& value, int64_t item) const {
    const int64_t first = item * kTokens, end = std::min(first + kTokens, step.tokens);
    for (int64_t token = first; token < end; token++)
      layer.is_bf16 ? turn_heads<BFloat16>(token) : turn_heads<float>(token);
    kernels::write_kv_rows(key, first, end);
    kernels::write_kv_rows(value, first, end);
  }

  WriteCall write_call(int64_t column, void* target, void* scales) const {
    return {qkv + column * element_bytes, step.slots, target, scales, step.tokens, layer.kv_heads, layer.head_width,
            qkv_width, layer.head_width, layer.is_bf16, 1};
  }
  AttentionCall attention_call(const WriteCall& key, const WriteCall& value) const {
    return {qkv, key.target, key.scales, value.target, value.scales, nullptr, attended.data, qkv_width,
            layer.head_width, layer.query_heads, layer.kv_heads, layer.head_width, layer.head_width, layer.is_bf16,
            layer.scale, 0};
  }
};

void run(const Call& call, const AttentionStep& attention_step, const WriteCall& key, const WriteCall& value) {
  const DecoderLayer& layer = call.layer;
  const int64_t tokens = call.step.tokens;
  const bool is_bf16 = layer.is_bf16;
  const Product qkv{layer.qkv, call.normed.batch(tokens, nullptr), call.qkv, is_bf16};
  const Product out{layer.out, call.attended.batch(tokens, call.x), call.y, is_bf16};
  const Product gate_up{layer.gate_up, call.normed.batch(tokens, nullptr), call.gated.data, is_bf16};
  const Product down{layer.down, call.gated.batch(tokens, call.y), call.y, is_bf16};
  const AttentionCall attention = call.attention_call(key, value);
  kernels::AttentionPlan plan(attention_step, attention);
  const int64_t attentions = plan.items.size(), row_items = (tokens + kNormRows - 1) / kNormRows;
  const int64_t work = qkv.work() + out.work() + gate_up.work() + down.work();
  const int64_t threads = work < kernels::kSerialWork ? 1 : attention_step.threads;
  Phase phases[11];
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    Phase* phase = phases;
    const int64_t thread = omp_get_thread_num();
    Fetch fetch_qkv(qkv, thread), fetch_out(out, thread), fetch_gate_up(gate_up, thread), fetch_down(down, thread);
    const auto multiply = [&](const Product& product, Fetch& fetch) {
      share(*phase++, product.items(), fetch, [&](int64_t item) { product.run(item, threads); });
    };
    const auto quantise = [&](const Rows& rows, Fetch& fetch) {
      if (rows.bytes)
        share(*phase++, row_items, fetch,
              [&](int64_t item) { rows.quantise(item * kNormRows, std::min(kNormRows, tokens - item * kNormRows)); });
    };
    share(*phase++, row_items, fetch_qkv,
          [&](int64_t item) { call.norm(layer.input_norm, call.x, layer.input_epsilon, item); });
    multiply(qkv, fetch_out);
    share(*phase++, (tokens + kTokens - 1) / kTokens, fetch_out, [&](int64_t item) { call.place(key, value, item); });
    share(*phase++, attentions, fetch_out, [&](int64_t item) {
      plan.run(attention_step, attention, item, std::min(item + threads, attentions - 1));
    });
    if (!plan.parts.empty())
      share(*phase++, attentions, fetch_out, [&](int64_t item) { plan.merge(attention, item); });
    quantise(call.attended, fetch_out);
    multiply(out, fetch_gate_up);
    share(*phase++, row_items, fetch_gate_up,
          [&](int64_t item) { call.norm(layer.post_norm, call.y, layer.post_epsilon, item); });
    multiply(gate_up, fetch_down);
    quantise(call.gated, fetch_down);
    multiply(down, fetch_down);
  }
}

}  // namespace

extern "C" {

// x and y: [tokens, hidden], apart from each other. The caller checks widths as for `paged_attention`.
void decoder_layer(const DecoderLayer* layer, const LayerStep* step, const AttentionStep* attention_step, const void* x,
                   void* y, void* key, void* key_scales, void* value, void* value_scales) {
  static thread_local std::vector<char> memory;
  Workspace sizes{nullptr};
  Call(*layer, *step, x, y, sizes);
  if ((int64_t)memory.size() < sizes.taken + 64) memory.resize(sizes.taken + 64);
  Workspace workspace{memory.data() + (64 - (uintptr_t)memory.data() % 64) % 64};
  const Call call(*layer, *step, x, y, workspace);
  run(call, *attention_step, call.write_call(call.query_width, key, key_scales),
      call.write_call(call.query_width + call.kv_width, value, value_scales));
}
}
