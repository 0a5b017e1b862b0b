// Decoder layers in one call: of each, y = h + mlp(norm(h)), h = x + attention(norm(x)), over packed tokens and paged K and
// V, or with a mixer and its states in the place of attention; then, where the caller wants logits, the model's last norm and
// its head.
//
// One team of threads goes through the phases of all layers in one OpenMP region (team.h). While a thread waits it fetches
// the weights of the next product.
//
// Sums and roundings are those of the kernels in linear.cpp, rows.cpp and attention.cpp: a row depends neither on the other
// rows nor on the number of threads. Plain C interface; the memory between the phases is kept per calling thread and reused.

#include <omp.h>

#include <vector>

#include "layer_call.h"
#include "team.h"

namespace {

using kernels::AttentionPlan;

constexpr int64_t kFetched = 384 << 10;  // bytes of weights that a waiting thread fetches into its second-level cache
constexpr int64_t kLogits = 1 << 13;     // of an item
// More than one thread for a call that takes one thread 0.14 ms or more, if a layer takes it 0.01 ms: to wake a thread takes
// 0.015 to 0.05 ms, and each phase waits for the slowest.
constexpr int64_t kLeastCall = 2 * kernels::kSerialWork, kLeastLayer = kernels::kSerialWork / 8;  // work of products

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
  void mix(const LayerCall& call, Fetch& next) {
    const Mixer* mixer = call.layer.mixer;
    member.share(mixer->items * step.mixing->num_sequences, next, [&](int64_t item) {
      mixer->run(mixer, step.mixing, call.buffers.qkv, call.attended.data, item);
    });
    quantise(call.attended, next);
  }
  void attend(const LayerCall& call, const AttentionStep& view, AttentionPlan& plan, Fetch& next) {
    const int64_t items = plan.items.size();
    member.share(items, next,
                 [&](int64_t item) { plan.run(view, call.attention, item, std::min(item + 1, items - 1)); });
    if (!plan.parts.empty()) member.share(items, next, [&](int64_t item) { plan.merge(call.attention, item); });
    if (call.layer.is_gated || call.attended.bytes)
      member.share(row_items, next, [&](int64_t item) { call.finish_attended(item); });
  }
  // `after`: the first product of what follows, or null.
  void run(const LayerCall& call, int64_t view, std::vector<AttentionPlan>& plans, const Product* after) {
    const DecoderLayer& layer = call.layer;
    Fetch qkv = fetch_of(call.qkv, member), out = fetch_of(call.out, member), gate_up = fetch_of(call.gate_up, member),
          down = fetch_of(call.down, member), next = after ? fetch_of(*after, member) : Fetch{};
    member.share(row_items, qkv, [&](int64_t item) { call.norm(layer.input_norm, call.x, layer.input_epsilon, item); });
    add_down(call, call.qkv, call.buffers.normed, qkv);
    multiply(call.qkv, out);
    if (layer.mixer) {
      mix(call, out);
    } else {
      member.share((step.tokens + kTokens - 1) / kTokens, out, [&](int64_t item) { call.place(item); });
      attend(call, *step.views[view], plans[view], out);
    }
    add_down(call, call.out, call.attended, out);
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
      runner.run(call, decoder.views[i], plans, after);
      if (step.on_layer && !call.layer.mixer && !announce(member, i)) return;
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
      kernels::rms_norm_rows(last.is_bf16, decoder.is_shifted, decoder.norm, (const char*)step.y + step.wanted[row] * last.row_bytes(),
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
  plans.resize(step->num_views);
  if (const DecoderLayer* first = first_of(*decoder, false)) {
    const LayerCall any(*first, step->rows[0], *step, buffers, step->x);
    for (int64_t view = 0; view < step->num_views; view++) plans[view].make(*step->views[view], any.attention);
  }
  Call(*decoder, *step, buffers, plans, team).run();
  step->busy = team.busy() / team.threads();
}
}
