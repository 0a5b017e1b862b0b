// Attention over paged K and V, for decode and for prefill chunks, and the writing of K and V into their blocks.
//
// One item of work is (sequence, KV head, tile of query rows, range of keys); the query heads that share a KV head are
// rows of the same tile, so K and V are read once for all of them. An item walks over blocks of keys: K is packed
// transposed, V by rows, S = Q K^T, online softmax in float32, O += P V. Operands of both products are 32 bit words: a
// float or a pair of bfloat16. Where the new tokens of a sequence fit in one tile and its context is long, its keys are
// split over several items and merged at the end. Blocks and splits start at multiples of absolute positions and rows do
// not mix: a sequence's result depends neither on its company in the batch nor on the number of threads.
//
// What a query token sees is a range [begin, end) of key positions; causality, windows and two-way spans are made of it.
// Plain C interface, no state. Compiled for each of the CPU variants; AVX2 with FMA and F16C at least.

#include <cmath>
#include <vector>

#include "attention_tiles.h"
#include "common.h"
#include "kernels.h"

namespace {

using kernels::AttentionPlan;
using Item = kernels::AttentionItem;

// --------------------------------------------------------------------------------------------------------- the softmax

// Turns a row of scores (keys, a multiple of kLanes) into elements of P where they lie. `begin` and `end` are relative to the
// block. Updates the row's maximum and sums; returns the factor that is due to what was summed before.
template <class Word>
float softmax_row(float* scores, int64_t keys, int64_t begin, int64_t end, float scale, float softcap, float& maximum,
                  float* sums) {
  Floats lanes;
  for (int lane = 0; lane < kLanes; lane++) lanes[lane] = lane;
  Floats highest = splat(maximum);
  const bool whole = begin <= 0 && end >= keys;
  for (int64_t i = 0; i < keys; i += kLanes) {
    Floats x = load<Floats>(scores + i) * scale;
    if (softcap != 0) x = capped(x, softcap) * kLog2E;
    if (!whole) {
      const Floats position = lanes + (float)i;
      x = (position >= (float)begin) & (position < (float)end) ? x : splat(-INFINITY);
    }
    store(scores + i, x);
    highest = larger(highest, x);
  }
  const float before = maximum;
  maximum = largest(highest);
  const Floats shift = splat(maximum);
  Floats added = {};
  typename Word::Element* target = (typename Word::Element*)scores;
  for (int64_t i = 0; i < keys; i += kLanes) {
    const Floats p = power_of_two<Word::kCoarse>(load<Floats>(scores + i) - shift);
    added += p;
    narrow(target + i, p);
  }
  const float factor = before == maximum ? 1.0f : power_of_two<false>(splat(before - maximum))[0];
  store(sums, load<Floats>(sums) * factor + added);
  return factor;
}

// ------------------------------------------------------------------------------------------------------------ the items

struct Shape {
  int64_t group, tile_tokens, key_words, value_width, part_size;
  // `depth`: what key_words is padded to.
  Shape(const AttentionCall& call, int64_t elements, int64_t depth)
      : group(call.query_heads / call.kv_heads),
        tile_tokens(std::max<int64_t>(1, kTile / group)),
        key_words(padded((call.key_width + elements - 1) / elements, depth)),
        value_width(padded(call.value_width, kLanes)),
        part_size(value_width + 2) {}
};

// All items, and the floats that parts of split contexts take.
int64_t list_items(const AttentionStep& step, const AttentionCall& call, const Shape& shape, std::vector<Item>& items) {
  int64_t part_floats = 0;
  for (int64_t sequence = 0; sequence < step.sequences; sequence++) {
    const int64_t first = step.query_starts[sequence], end = step.query_starts[sequence + 1];
    const int64_t tiles = (end - first + shape.tile_tokens - 1) / shape.tile_tokens;
    for (int64_t tile = tiles - 1; tile >= 0; tile--) {  // the longest first
      const int64_t token = first + tile * shape.tile_tokens, tokens = std::min(shape.tile_tokens, end - token);
      const int64_t low = *std::min_element(step.begins + token, step.begins + token + tokens) / kKeys * kKeys;
      const int64_t high = *std::max_element(step.ends + token, step.ends + token + tokens);
      const int64_t split = tiles == 1 ? kSplit : high;
      const int64_t first_split = low / split, parts = (high + split - 1) / split - first_split;
      const int64_t part_size = tokens * shape.group * shape.part_size;
      for (int64_t i = 0; i < parts; i++)
        for (int64_t head = 0; head < call.kv_heads; head++)
          items.push_back({sequence, head, token, tokens, std::max(low, (first_split + i) * split),
                           std::min(high, (first_split + i + 1) * split),
                           part_floats + (i * call.kv_heads + head) * part_size, i == 0 ? parts : -parts,
                           call.kv_heads * part_size});
      if (parts > 1) part_floats += parts * call.kv_heads * part_size;
    }
  }
  return part_floats;
}

template <class Query>
void write_output(const AttentionCall& call, const Item& item, const Shape& shape, int64_t row, const float* sums,
                  float divisor) {
  alignas(64) Query rounded_row[kMaxWidth];
  for (int64_t i = 0; i < shape.value_width; i += kLanes)
    narrow(rounded_row + i, load<Floats>(sums + i) * (1.0f / divisor));
  const int64_t token = item.token + row / shape.group, head = item.head * shape.group + row % shape.group;
  std::memcpy((Query*)call.out + (token * call.query_heads + head) * call.value_width, rounded_row,
              call.value_width * sizeof(Query));
}

template <class Word, class Query>
void load_queries(const AttentionStep& step, const AttentionCall& call, const Item& item, const Shape& shape,
                  Scratch& scratch) {
  const int64_t rows = item.tokens * shape.group;
  std::fill_n(scratch.outputs, rows * shape.value_width, 0.0f);
  std::fill_n(scratch.maxima, rows, kLowest);
  std::fill_n(scratch.sums, rows * kLanes, 0.0f);
  for (int64_t row = 0; row < rows; row++) {
    const int64_t token = item.token + row / shape.group, head = item.head * shape.group + row % shape.group;
    scratch.begins[row] = step.begins[token];
    scratch.ends[row] = step.ends[token];
    if (call.sinks && item.parts > 0) {
      scratch.maxima[row] = call.sinks[head] * kLog2E;
      scratch.sums[row * kLanes] = 1;
    }
    const Query* source = (const Query*)call.query + token * call.query_token_stride + head * call.query_head_stride;
    const Rows<Query> one{source, nullptr, 1, 0, call.key_width, 1};
    const float* words = one.template words<Word>(0, scratch.rows);
    std::memcpy(scratch.queries + row * shape.key_words, words, shape.key_words * sizeof(float));
  }
}

void find_slots(const AttentionStep& step, const Item& item, int64_t key, int64_t begin, int64_t* slots) {
  const int64_t* table = step.tables + item.sequence * step.table_width;
  const int64_t keys = std::min<int64_t>(kKeys, item.keys_end - key);
  int64_t i = 0;
  while (i < keys) {
    const int64_t position = key + i, offset = position % step.block_size;
    const int64_t run = std::min(step.block_size - offset, keys - i);
    const int64_t slot = table[position / step.block_size] * step.block_size + offset;
    for (int64_t j = 0; j < run; j++) slots[i + j] = position + j < begin ? -1 : slot + j;
    i += run;
  }
  std::fill(slots + i, slots + kKeys, -1);
}

template <class Word, class Query, class Stored>
void run_item(const AttentionStep& step, const AttentionCall& call, const Item& item, const Item& next,
              const Shape& shape, float* parts, Scratch& scratch) {
  using Products = typename Word::Products;
  constexpr int64_t kKeyUnit = std::max<int64_t>(kLanes, Products::kDepth * Word::kElements);
  const int64_t groups_k = (call.key_width + kGroup - 1) / kGroup, groups_v = (call.value_width + kGroup - 1) / kGroup;
  const Rows<Stored> keys{(const Stored*)call.key, (const _Float16*)call.key_scales, call.kv_heads, item.head,
                          call.key_width, groups_k};
  const Rows<Stored> values{(const Stored*)call.value, (const _Float16*)call.value_scales, call.kv_heads, item.head,
                            call.value_width, groups_v};
  const float scale = call.softcap != 0 ? call.scale : call.scale * kLog2E;
  const int64_t rows = item.tokens * shape.group, tiles = (rows + Products::kRows - 1) / Products::kRows;
  Products products;
  load_queries<Word, Query>(step, call, item, shape, scratch);
  const int64_t lowest = *std::min_element(scratch.begins, scratch.begins + rows);
  for (int64_t key = item.key; key < item.keys_end; key += kKeys) {
    const int64_t num_keys = std::min<int64_t>(kKeys, item.keys_end - key), wide = padded(num_keys, kKeyUnit);
    const bool last = key + kKeys >= item.keys_end;
    if (key == item.key)
      find_slots(step, item, key, lowest, scratch.slots);
    else
      std::memcpy(scratch.slots, scratch.next_slots, sizeof(scratch.slots));
    find_slots(step, last ? next : item, last ? next.key : key + kKeys, 0, scratch.next_slots);
    scratch.next_head = last ? next.head : item.head;
    pack_keys<Word>(keys, wide, scratch);
    pack_values<Word>(values, wide, scratch);
    for (int64_t tile = 0; tile < tiles; tile++) {
      const int64_t row = Products::first_row(tile, tiles, rows), height = Products::first_row(tile + 1, tiles, rows) - row;
      const int64_t end = *std::max_element(scratch.ends + row, scratch.ends + row + height) - key;
      if (end <= 0) continue;  // what a tile does not see would add zeros
      const int64_t seen = std::min(wide, padded(end, kKeyUnit));
      products.template multiply<Word>(height, seen / kLanes, scratch.queries + row * shape.key_words, shape.key_words,
                                       scratch.keys, kKeys, shape.key_words, scratch.scores, kKeys, nullptr);
      float factors[Products::kRows];
      for (int64_t r = 0; r < height; r++) {
        for (int64_t i = kKeys * (row + r) / rows; i < kKeys * (row + r + 1) / rows; i++)
          keys.prefetch(scratch.next_slots[i], scratch.next_head);  // a share per row: a burst would stall
        factors[r] = softmax_row<Word>(scratch.scores + r * kKeys, seen, scratch.begins[row + r] - key,
                                       scratch.ends[row + r] - key, scale, call.softcap, scratch.maxima[row + r],
                                       scratch.sums + (row + r) * kLanes);
      }
      products.template multiply<Word>(height, shape.value_width / kLanes, scratch.scores, kKeys, scratch.values,
                                       shape.value_width, seen / Word::kElements,
                                       scratch.outputs + row * shape.value_width, shape.value_width, factors);
    }
  }
  for (int64_t row = 0; row < rows; row++) {
    const float* sums = scratch.outputs + row * shape.value_width;
    const float divisor = sum_of(load<Floats>(scratch.sums + row * kLanes));
    if (item.parts == 1) {
      write_output<Query>(call, item, shape, row, sums, divisor);
    } else {
      float* part = parts + item.part + row * shape.part_size;
      std::memcpy(part, sums, shape.value_width * sizeof(float));
      part[shape.value_width] = scratch.maxima[row];
      part[shape.value_width + 1] = divisor;
    }
  }
}

// Adds up the parts of the split context whose first item this is.
template <class Query>
void merge_parts(const AttentionCall& call, const Item& item, const Shape& shape, const float* parts) {
  alignas(64) float sums[kMaxWidth];
  for (int64_t row = 0; row < item.tokens * shape.group; row++) {
    const float* first = parts + item.part + row * shape.part_size + shape.value_width;
    float maximum = kLowest, divisor = 0;
    for (int64_t i = 0; i < item.parts; i++) maximum = std::max(maximum, first[i * item.stride]);
    std::fill_n(sums, shape.value_width, 0.0f);
    for (int64_t i = 0; i < item.parts; i++) {
      const float* part = first + i * item.stride;
      const float factor = power_of_two<false>(splat(part[0] - maximum))[0];
      divisor += factor * part[1];
      for (int64_t j = 0; j < shape.value_width; j += kLanes)
        store(sums + j, load<Floats>(sums + j) + load<Floats>(part - shape.value_width + j) * factor);
    }
    write_output<Query>(call, item, shape, row, sums, divisor);
  }
}

#if defined(__AVX512BF16__)
using Pair = BFloat16Pair;
#else
using Pair = Float32;
#endif

// Calls run(Word, Query, Stored) with what the call's types are.
template <class Run>
auto with_types(const AttentionCall& call, Run run) {
  if (call.is_bf16)
    return call.key_scales ? run(Pair{}, BFloat16{}, int8_t{}) : run(Pair{}, BFloat16{}, BFloat16{});
  return call.key_scales ? run(Float32{}, float{}, int8_t{}) : run(Float32{}, float{}, float{});
}

Shape shape_of(const AttentionCall& call) {
  return with_types(call, [&](auto word, auto, auto) {
    using Word = decltype(word);
    return Shape(call, Word::kElements, Word::Products::kDepth);
  });
}

// ----------------------------------------------------------------------------------------------------- writing K and V

template <class Given>
void quantise_row(const Given* row, int64_t width, int8_t* codes, _Float16* scales) {
  for (int64_t first = 0; first < width; first += kGroup) {
    alignas(64) float group[kGroup + kLanes] = {};
    alignas(64) int8_t rounded_codes[kGroup + kLanes];
    const int64_t count = std::min<int64_t>(kGroup, width - first);
    alignas(64) Given given[kGroup + kLanes] = {};
    std::memcpy(given, row + first, count * sizeof(Given));
    Floats highest = {};
    for (int64_t i = 0; i < count; i += kLanes) {
      const Floats x = widened(given + i);
      store(group + i, x);
      highest = larger(highest, larger(x, -x));
    }
    const _Float16 scale = (_Float16)(largest(highest) / 127.0f);
    const float divisor = scale == 0 ? 1.0f : (float)scale;
    for (int64_t i = 0; i < count; i += kLanes) {
      const Ints code = nearest(load<Floats>(group + i) / divisor);
      const Ints low = code > 127 ? Ints{} + 127 : code;
      store(rounded_codes + i, __builtin_convertvector(low < -127 ? Ints{} - 127 : low, Bytes));
    }
    std::memcpy(codes + first, rounded_codes, count);
    scales[first / kGroup] = scale;
  }
}

template <class Given>
void write_rows(const WriteCall& call, int64_t begin, int64_t end) {
  const int64_t groups = (call.width + kGroup - 1) / kGroup;
  for (int64_t token = begin; token < end; token++)
    for (int64_t head = 0; head < call.heads; head++) {
      const Given* row = (const Given*)call.rows + token * call.token_stride + head * call.head_stride;
      const int64_t target = call.slots[token] * call.heads + head;
      if (call.scales)
        quantise_row(row, call.width, (int8_t*)call.target + target * call.width,
                     (_Float16*)call.scales + target * groups);
      else
        std::memcpy((Given*)call.target + target * call.width, row, call.width * sizeof(Given));
    }
}

}  // namespace

namespace kernels {

void AttentionPlan::make(const AttentionStep& step, const AttentionCall& call) {
  const Shape shape = shape_of(call);
  items.clear();
  pairs = 0;
  parts.resize(list_items(step, call, shape, items));
  for (const Item& item : items) pairs += (item.keys_end - item.key) * item.tokens * shape.group;
}

void AttentionPlan::run(const AttentionStep& step, const AttentionCall& call, int64_t item, int64_t next) {
  static thread_local Scratch scratch;  // its zeros are never written
  with_types(call, [&](auto word, auto query, auto stored) {
    run_item<decltype(word), decltype(query), decltype(stored)>(step, call, items[item], items[next], shape_of(call),
                                                                parts.data(), scratch);
  });
}

void AttentionPlan::merge(const AttentionCall& call, int64_t item) {
  if (items[item].parts <= 1) return;
  if (call.is_bf16)
    merge_parts<BFloat16>(call, items[item], shape_of(call), parts.data());
  else
    merge_parts<float>(call, items[item], shape_of(call), parts.data());
}

void write_kv_rows(const WriteCall& call, int64_t begin, int64_t end) {
  call.is_bf16 ? write_rows<BFloat16>(call, begin, end) : write_rows<float>(call, begin, end);
}

}  // namespace kernels

extern "C" {

// Widths up to 256 and as many query heads per KV head as fit in a tile of 128 rows; the caller checks.
void paged_attention(const AttentionStep* step, const AttentionCall* call) {
  AttentionPlan plan(*step, *call);
  const int64_t count = plan.items.size();
  const int64_t threads = plan.pairs < kSerialPairs ? 1 : std::min(step->threads, count);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < count; i++) plan.run(*step, *call, i, std::min(i + threads, count - 1));
    if (!plan.parts.empty()) {
#pragma omp for schedule(dynamic, 1)
      for (int64_t i = 0; i < count; i++) plan.merge(*call, i);
    }
  }
}

void write_kv(const WriteCall* key, const WriteCall* value) {
  for (const WriteCall* call : {key, value}) {
#pragma omp parallel for num_threads(call->threads) if (call->tokens * call->heads * call->width > 1 << 16)
    for (int64_t token = 0; token < call->tokens; token++) kernels::write_kv_rows(*call, token, token + 1);
  }
}
}
