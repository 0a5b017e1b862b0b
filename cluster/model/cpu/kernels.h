// What the sources of this library share: the pieces of a product and of attention that one thread runs at a time.
// `items` are independent of each other; the caller distributes them over threads. Pointers without a type are to
// elements: bfloat16 if `is_bf16`, else float32.

#pragma once

#include <cstdint>
#include <vector>

extern "C" {
// The next two are mirrored by library.py. Pointers are owned by the caller; bias, scales and sums are in the order of the
// packed outputs.
struct Layer;

// What a LoRA adapter adds to a layer: y += B A x. The layer's outputs may be several parts, each with an A and a B.
struct LayerAdapter {
  const void* down;  // the parts' A, one after the other, parts * rank rows in groups (adapters.cpp). Null: nothing is added
  const void* up;    // the parts' B, packed as weights with `rank` inputs are
  int64_t rank;      // of each part's A, a multiple of 4, with zeros where it is smaller
};

struct Layer {
  const char* packed;
  const float* bias;      // or null
  const float* scales;    // int8 weights only, else null: weight = scale * int8
  const int32_t* sums;    // int8 only: 128 * sum over the inputs
  int64_t inputs;
  int64_t outputs;        // of y; a gated layer has twice as many rows of weights
  int64_t gated;          // y = silu(gate) * up; gate and up are two parts
  const LayerAdapter* adapters;  // by number, from 1 on; null: none
  int64_t parts, down_width;     // what A makes of a row has at most `down_width` numbers, whole groups
  int64_t second, third;         // of a layer that is not gated: where these parts begin, multiples of kLanes
};

// The next two, and WriteCall, are mirrored by attention_cpu.py.
struct AttentionStep {          // the same for all layers of a step that share a window
  const int64_t* tables;        // [sequences, table_width] block ids
  const int32_t* query_starts;  // [sequences + 1] first new token of each sequence
  const int32_t* begins;        // [tokens]
  const int32_t* ends;          // [tokens]
  int64_t sequences, table_width, block_size, threads;
};

struct AttentionCall {
  const void *query, *key, *key_scales, *value, *value_scales;  // scales: null where the cache is plain
  const float* sinks;                                           // [query_heads] or null
  void* out;                                                    // [tokens, query_heads, value_width]
  int64_t query_token_stride, query_head_stride;                // elements
  int64_t query_heads, kv_heads, key_width, value_width;
  int64_t is_bf16;         // of the query and the output, and of K and V in a plain cache; else float32
  double scale, softcap;  // softcap 0: none
};

// The next six are mirrored by mixers.py.
struct MixerStep {             // the same for all layers of a step
  const int32_t* starts;       // [spans + 1] the first token of each span
  const int64_t* sequences;    // [num_sequences + 1] the first span of each sequence
  const int64_t *source, *target;  // [spans, pages]: of a sequence's state before its first span, and after a span; -1: none
  char* memory;                // where page 0 begins
  int64_t num_sequences, pages;  // pages 0: sequences are new, and nothing is kept
};

// A mixer that keeps states, without its products; each kind begins with one. `run` is one item: it makes its part of `out`
// of its part of `rows`, which the first product gave, and takes its part of the states on.
struct Mixer {
  void (*run)(const Mixer* mixer, const MixerStep* step, const void* rows, void* out, int64_t item);
  int64_t items, first_page, page_bytes, is_bf16;  // items: of a sequence; first_page: of the layer's states
};

// A short causal convolution of some channels of a row, with silu. Its state is the last inputs, [channels, taps].
struct Convolution {
  const float *weight, *bias;  // [taps, channels], [channels] or null
  int64_t taps, channels;
  int64_t row_width, state_offset;  // of a row of the products; in the layer's states
};

// Columns of a row: where the parts of the first key head begin, and the steps to the next key head's.
struct DeltaMixer {
  Mixer mixer;
  Convolution convolution;
  const float *rates, *shifts;        // [value_heads]
  const void* norm;                   // [value_width]
  int64_t key_heads, value_heads, key_width, value_width;
  int64_t query, key, key_step, value, gate, value_step, beta, decay, gate_step;
  int64_t state_offset;
  double epsilon;
};

// Mamba 2. Columns of a row: where the channels of the convolution begin (x of all heads, B of all groups, C), and the steps.
struct StateSpaceMixer {
  Mixer mixer;
  Convolution convolution;
  const float *rates, *shifts, *skips;  // [heads]
  int64_t heads, groups, head_width, state_width;
  int64_t first, steps, state_offset;
  double low, high;                     // of a step
};

// A row is three gates and inputs: B, C and x.
struct ConvolutionMixer {
  Mixer mixer;
  const float *weight, *bias;  // [taps, channels], [channels] or null
  int64_t channels, taps;
};

struct WriteCall {
  const void* rows;       // [tokens, heads, width]
  const int64_t* slots;   // [tokens]
  void *target, *scales;  // blocks; scales: null where the cache is plain and rows are copied as they are
  int64_t tokens, heads, width, token_stride, head_stride, is_bf16, threads;
};
}

namespace kernels __attribute__((visibility("hidden"))) {

// ---------------------------------------------------------------------------------------------------------- linear.cpp

// The adapters of some rows.
struct RowAdapters {
  const int32_t* numbers;  // [rows] 0: none
  const void* down;        // [rows, down_width] A x
};

struct Batch {
  const char* x;                   // rows of the packed type's elements
  int64_t x_bytes;                 // from row to row
  const float* x_scales;           // int8 only: one a row
  int64_t rows;
  const void* residual = nullptr;  // [rows, outputs], added to the result; may be the result's memory
  RowAdapters adapters = {};       // no numbers: no row has one
};

// y [rows, outputs] of x. Rows of bfloat16 are even in width.
struct Product {
  const Layer* layer;
  Batch batch;
  void* y;
  bool is_bf16;

  int64_t items() const;
  int64_t work() const;  // a measure of its time: outputs * steps * rows
  void run(int64_t item, int64_t threads) const;
  // Where item's weights lie, and how many bytes of them.
  const char* weights(int64_t item, int64_t* bytes) const;
};
constexpr int64_t kSerialWork = 1 << 23;  // less is faster on one thread: 70 us with AVX-512, to wake a second takes 15 to 25

// -------------------------------------------------------------------------------------------------------- adapters.cpp

constexpr int64_t kDownRows = 8, kRunRows = 32;  // of a group of A; the most of x in a call

// y [., down_width]: what one group of A makes of rows `rows[0..count)` of x, in their rows of y.
void adapter_down(bool is_bf16, const Layer& layer, const LayerAdapter& adapter, const void* x, const int64_t* rows,
                  int64_t count, int64_t group, void* y);

// ------------------------------------------------------------------------------------------------------------ rows.cpp

constexpr int64_t kSerialElements = 1 << 17;  // of x, in a pass over it that one thread makes as fast as two

// `is_shifted`: times 1 + weight, rounded once; else times the weight, after a first rounding.
void rms_norm_rows(bool is_bf16, bool is_shifted, const void* weight, const void* x, void* y, int64_t rows, int64_t width,
                   float epsilon);

// x ≈ scales[row] * (byte - 128); a row of bytes takes `x_bytes`.
void quantise_rows(bool is_bf16, const void* x, uint8_t* bytes, float* scales, int64_t rows, int64_t width, int64_t x_bytes);

// -------------------------------------------------------------------------------------------------------- attention.cpp

struct AttentionItem {
  int64_t sequence, head, token, tokens, key, keys_end;
  int64_t part, parts, stride;  // where it leaves its part of a split context, in floats; parts 1: not split
};

struct AttentionPlan {
  std::vector<AttentionItem> items;
  std::vector<float> parts;  // of split contexts; empty: nothing to merge
  int64_t pairs = 0;         // query rows times keys

  AttentionPlan() = default;
  AttentionPlan(const AttentionStep& step, const AttentionCall& call) { make(step, call); }
  void make(const AttentionStep& step, const AttentionCall& call);  // a new plan in the memory of the last
  // `next`: an item that this thread is likely to run after it.
  void run(const AttentionStep& step, const AttentionCall& call, int64_t item, int64_t next);
  // When all have run. Adds up the parts of the split context whose first item this is.
  void merge(const AttentionCall& call, int64_t item);
};

void write_kv_rows(const WriteCall& call, int64_t begin, int64_t end);

}  // namespace kernels
