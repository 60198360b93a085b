// What the tests of the codec without TensorFlow share: lists of tensors in memory, and the three steps over
// them. Buffers have their exact size on the heap, so that a sanitizer sees a read or a write beyond one.
#ifndef HVD8BIT_TESTS_CC_HARNESS_H_
#define HVD8BIT_TESTS_CC_HARNESS_H_

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tf_ops/codec/float_types.h"
#include "tf_ops/codec/payload.h"

namespace hvd8bit {

#define CHECK(condition)                                                             \
  do {                                                                               \
    if (!(condition)) {                                                              \
      std::fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                                  \
    }                                                                                \
  } while (false)

using Bytes = std::vector<uint8_t>;

inline std::mt19937_64 random_bits(20161);

inline int64_t RandomUpTo(int64_t most) {
  return std::uniform_int_distribution<int64_t>(0, most)(random_bits);
}

// A copy whose end is the end of its memory.
inline std::unique_ptr<uint8_t[]> Exact(const Bytes& bytes) {
  std::unique_ptr<uint8_t[]> copy(new uint8_t[bytes.size()]);
  std::copy(bytes.begin(), bytes.end(), copy.get());
  return copy;
}

// Three threads, ranges of uneven size.
inline void Threads(int64_t units, int64_t /*cost*/, const std::function<void(int64_t, int64_t)>& fn) {
  const int64_t first = units / 5, second = units / 2;
  std::thread a([&] { fn(0, first); }), b([&] { fn(first, second); });
  fn(second, units);
  a.join();
  b.join();
}

// A list of tensors in memory: the element types in turn, one element off the start of their memory.
struct List {
  std::vector<TensorInfo> infos;
  std::vector<std::unique_ptr<uint8_t[]>> memory;
  std::vector<const void*> data;

  explicit List(const std::vector<int64_t>& sizes) {
    for (size_t i = 0; i < sizes.size(); ++i) {
      const auto dtype = static_cast<DType>(i % 4 + 1);
      infos.push_back({dtype, {sizes[i]}, sizes[i]});
      const int64_t width = DTypeBytes(dtype);
      memory.emplace_back(new uint8_t[width * (sizes[i] + 1)]);
      for (int64_t at = 0; at < width * (sizes[i] + 1); ++at) {
        memory.back()[at] = static_cast<uint8_t>(random_bits());
      }
      data.push_back(memory.back().get() + width);
    }
  }

  // Where results can go that look like this list: filled, so that what is not written differs.
  std::vector<std::unique_ptr<uint8_t[]>> Results(std::vector<void*>* out) const {
    std::vector<std::unique_ptr<uint8_t[]>> results;
    for (const TensorInfo& info : infos) {
      const int64_t bytes = DTypeBytes(info.dtype) * info.elements;
      results.emplace_back(new uint8_t[bytes]);
      std::fill(results.back().get(), results.back().get() + bytes, 0xa5);
      out->push_back(results.back().get());
    }
    return results;
  }
};

// The three steps of one back end; the CPU's here. What was received has been checked.
struct Steps {
  virtual ~Steps() = default;
  virtual void Encode(const Plan& plan, const std::vector<Layout::Chunk>& chunks, int64_t slice,
                      const std::vector<const void*>& data, uint8_t* payload) const {
    EncodeList(plan, chunks, slice, data, payload, Threads);
  }
  virtual void Reduce(const Plan& plan, const Layout::Chunk& chunk, int64_t shard, int64_t slice,
                      const uint8_t* payload, uint8_t* out) const {
    ReduceShards(plan, chunk, shard, slice, payload, out, Threads);
  }
  virtual void Decode(const Plan& plan, const std::vector<std::vector<Layout::Chunk>>& slices,
                      const std::vector<const uint8_t*>& payloads, double factor,
                      const std::vector<void*>& out) const {
    for (size_t slice = 0; slice < slices.size(); ++slice) {
      DecodeList(plan, slices[slice], payloads[slice], factor, out, Threads);
    }
  }
};

inline Bytes Encode(const Steps& steps, const Plan& plan, const List& list, int64_t slice,
                    std::vector<int64_t>* sizes) {
  const auto chunks = SliceOfAllChunks(plan.layout, slice);
  int64_t bytes = 0;
  for (const auto& chunk : chunks) {
    sizes->push_back(chunk.Bytes());
    bytes += chunk.Bytes();
  }
  const auto exact = Exact(Bytes(bytes, 0xa5));
  steps.Encode(plan, chunks, slice, list.data, exact.get());
  return {exact.get(), exact.get() + bytes};
}

// All three steps for workers that hold the same list; returns every byte that was made.
inline Bytes Exchange(const Steps& steps, const Plan& plan, const List& list) {
  const int64_t shards = plan.layout.shards();
  Bytes trace;
  std::vector<void*> out;
  const auto results = list.Results(&out);
  std::vector<std::vector<Layout::Chunk>> slices;
  std::vector<std::unique_ptr<uint8_t[]>> gathered_slices;
  std::vector<const uint8_t*> payloads;
  for (int64_t slice = 0; slice < plan.layout.slices(); ++slice) {
    std::vector<int64_t> sizes;
    const Bytes payload = Encode(steps, plan, list, slice, &sizes);
    trace.insert(trace.end(), payload.begin(), payload.end());

    Bytes gathered;
    int64_t offset = 0;
    for (int64_t shard = 0; shard < shards; ++shard) {
      Bytes received;
      for (int64_t worker = 0; worker < shards; ++worker) {
        received.insert(received.end(), payload.begin() + offset, payload.begin() + offset + sizes[shard]);
      }
      offset += sizes[shard];
      const auto exact = Exact(received);
      const Layout::Chunk chunk = plan.layout.GetChunk(shard, slice);
      const std::vector<int64_t> sent(shards, sizes[shard]);
      CHECK(CheckShards(plan, chunk, shard, slice, exact.get(), received.size(), sent).empty());
      CHECK(CheckShardSizes(plan, chunk, received.size(), sent).empty());
      const auto reduced = Exact(Bytes(chunk.Bytes(), 0xa5));
      steps.Reduce(plan, chunk, shard, slice, exact.get(), reduced.get());
      gathered.insert(gathered.end(), reduced.get(), reduced.get() + chunk.Bytes());
    }
    trace.insert(trace.end(), gathered.begin(), gathered.end());
    gathered_slices.push_back(Exact(gathered));
    slices.push_back(SliceOfAllChunks(plan.layout, slice));
    payloads.push_back(gathered_slices.back().get());
    CHECK(CheckReduced(plan, slices.back(), slice, payloads.back(), gathered.size()).empty());
    CHECK(CheckReducedSize(slices.back(), gathered.size()).empty());
  }
  steps.Decode(plan, slices, payloads, 1.25, out);
  for (size_t i = 0; i < out.size(); ++i) {
    const auto* bytes = static_cast<const uint8_t*>(out[i]);
    trace.insert(trace.end(), bytes, bytes + DTypeBytes(list.infos[i].dtype) * list.infos[i].elements);
  }
  return trace;
}

inline Plan MakePlan(const Spec& spec, const List& list, int64_t shards, int64_t slices,
                     const Backend* backend) {
  CHECK(CheckSpec(spec).empty());
  return Plan{spec, Layout(list.infos, spec.block_size, shards, slices), list.infos, backend, -3};
}

}  // namespace hvd8bit

#endif  // HVD8BIT_TESTS_CC_HARNESS_H_
