// The CUDA kernels on the host (cuda_emulation/), against the scalar back end: every byte of an exchange,
// over the shapes at which the kernels change their ways, and what a chunk that does not fit becomes.
#include <cmath>
#include <cstdio>
#include <limits>

#include "tests/cc/harness.h"
#include "tf_ops/codec/codebook.h"
#include "tf_ops/codec/cpu/backend.h"
#include "tf_ops/codec/cuda/arguments.h"
#include "tf_ops/codec/cuda/kernels.h"
#include "tf_ops/codec/cuda/lists.h"

namespace hvd8bit {
namespace {

struct CudaSteps : Steps {
  void Encode(const Plan& plan, const std::vector<Layout::Chunk>& chunks, int64_t slice,
              const std::vector<const void*>& data, uint8_t* payload) const override {
    CHECK(cuda::EncodeList(plan, chunks, slice, data, payload, nullptr).empty());
  }
  void Reduce(const Plan& plan, const Layout::Chunk& chunk, int64_t shard, int64_t slice,
              const uint8_t* payload, uint8_t* out) const override {
    CHECK(cuda::ReduceShards(plan, chunk, shard, slice, payload, out, "reduce", nullptr).empty());
    CHECK(cuda::TakeReport().empty());
  }
  void Decode(const Plan& plan, const std::vector<std::vector<Layout::Chunk>>& slices,
              const std::vector<const uint8_t*>& payloads, double factor,
              const std::vector<void*>& out) const override {
    CHECK(cuda::DecodeList(plan, slices, payloads, factor, out, "decode", nullptr).empty());
    CHECK(cuda::TakeReport().empty());
  }
};

void Agree(const List& list, const Spec& spec, int64_t shards, int64_t slices) {
  const Plan plan = MakePlan(spec, list, shards, slices, ScalarBackend());
  const Bytes expected = Exchange(Steps(), plan, list), got = Exchange(CudaSteps(), plan, list);
  for (size_t i = 0; i < expected.size(); ++i) {
    if (got[i] != expected[i]) {
      std::fprintf(stderr, "byte %zu of %zu: %d, the scalar back end has %d; block size %d, %d shards\n", i,
                   expected.size(), got[i], expected[i], static_cast<int>(spec.block_size),
                   static_cast<int>(shards));
      std::exit(1);
    }
  }
}

Spec MakeSpec(int data_type, int64_t block_size, float fixed_scale = 0.f) {
  return {static_cast<uint8_t>(data_type), block_size, fixed_scale,
          data_type % 2 == 0 ? Rounding::kStochastic : Rounding::kNearest};
}

// Block sizes: a unit, not a power of two, a warp's, a block in two warps, a tile, just more, many tiles, one
// block.
void ExchangesAgree() {
  const std::vector<std::vector<int64_t>> lists = {
      {0}, {1}, {0, 0, 5}, {63, 65, 1, 0, 127}, {4097, 3, 1000, 9000}, {20000}, {1, 1, 1, 1, 1, 1, 1}};
  for (const auto& sizes : lists) {
    const List list(sizes);
    for (int64_t block_size : {64, 192, 512, 1024, 4096, 4160, 8192, 0}) {
      for (int data_type = 1; data_type <= NumberOfDataTypes(); ++data_type) {
        const bool large = sizes[0] + sizes.back() > 5000;
        if (large && (data_type + block_size / 64) % 4 != 0) {
          continue;
        }
        Agree(list, MakeSpec(data_type, block_size, data_type == 3 ? 150.f : 0.f), 1 + RandomUpTo(3),
              1 + RandomUpTo(2));
      }
    }
  }
}

// More tensors and more chunks than one launch takes.
void LongListsAgree() {
  std::vector<int64_t> sizes;
  for (int i = 0; i < 3 * cuda::kPieces; ++i) {
    sizes.push_back(RandomUpTo(150));
  }
  const List list(sizes);
  Agree(list, MakeSpec(1, 64), 1, 1);
  Agree(list, MakeSpec(2, 0), 2, 3);
  const List one({100});
  Agree(one, MakeSpec(1, 64), 2 * cuda::kChunks + 5, 1);
  Agree(one, MakeSpec(4, 64), 3, 2 * cuda::kChunks);
}

// Numbers in place of random bits: those have a NaN or an Inf in almost every block.
void OrdinaryNumbersAgree() {
  const List list({5000, 5000, 5000, 5000});
  std::normal_distribution<float> normal;
  for (size_t i = 0; i < list.infos.size(); ++i) {
    ForDType(list.infos[i].dtype, [&](auto* type) {
      using T = std::remove_pointer_t<decltype(type)>;
      T* to = static_cast<T*>(const_cast<void*>(list.data[i]));
      for (int64_t at = 0; at < list.infos[i].elements; ++at) {
        const T value = FromFloat<T>(std::exp(3 * normal(random_bits)) * normal(random_bits));
        std::memcpy(reinterpret_cast<uint8_t*>(to) + at * sizeof value, &value, sizeof value);
      }
    });
  }
  for (int data_type = 1; data_type <= NumberOfDataTypes(); ++data_type) {
    Agree(list, MakeSpec(data_type, 64 << (data_type * 2 - 2)), 2, 1);
    Agree(list, MakeSpec(data_type, data_type % 2 ? 0 : 65536), 3, 2);
  }
}

bool AllNan(const float* x, int64_t n) {
  return std::all_of(x, x + n, [](float value) { return std::isnan(value); });
}

// Whatever of a header differs, the sum and the decoded chunk are NaN, and the host is told which worker's it
// was.
void ChunksThatDoNotFitBecomeNan() {
  const int64_t elements = 10000;
  const std::vector<TensorInfo> infos = {{DType::kFloat32, {elements}, elements}};
  for (int64_t block_size : {1024, 8192}) {
    const Spec spec = MakeSpec(1, block_size);
    const Plan plan{spec, Layout(infos, block_size, 2, 1), infos, ScalarBackend()};
    std::vector<float> x(elements, 0.5f);
    const auto chunks = SliceOfAllChunks(plan.layout, 0);
    const int64_t first = chunks[0].Bytes(), second = chunks[1].Bytes();
    Bytes payload(first + second);
    EncodeList(plan, chunks, 0, {x.data()}, payload.data(), Threads);
    for (int64_t bit = 0; bit < 8 * kHeaderBytes; bit += 7) {
      Bytes damaged = payload;
      damaged[first + bit / 8] ^= 1 << bit % 8;
      const auto exact = Exact(damaged);

      std::vector<float> decoded(elements);
      CHECK(cuda::DecodeList(plan, {chunks}, {exact.get()}, 2.0, {decoded.data()}, "the decoder", nullptr)
                .empty());
      const int64_t border = chunks[0].pieces[0].stop;
      CHECK(
          std::all_of(decoded.begin(), decoded.begin() + border, [](float value) { return value == 0.5f; }));
      CHECK(AllNan(decoded.data() + border, elements - border));
      std::string report = cuda::TakeReport();
      CHECK(report.find("the decoder: the chunk from worker 1 ") == 0);
      CHECK(cuda::TakeReport().empty());

      Bytes received(damaged.begin() + first, damaged.end());
      received.insert(received.begin(), payload.begin() + first, payload.end());
      const auto both = Exact(received);
      Bytes reduced(second);
      CHECK(
          cuda::ReduceShards(plan, chunks[1], 1, 0, both.get(), reduced.data(), "the sum", nullptr).empty());
      report = cuda::TakeReport();
      CHECK(report.find("the sum: the chunk from worker 1 ") == 0);
      // Its header is good: all workers decode the same NaN.
      Bytes gathered(payload.begin(), payload.begin() + first);
      gathered.insert(gathered.end(), reduced.begin(), reduced.end());
      CHECK(CheckReduced(plan, chunks, 0, gathered.data(), gathered.size()).empty());
      DecodeList(plan, chunks, gathered.data(), 2.0, {decoded.data()}, Threads);
      CHECK(AllNan(decoded.data() + border, elements - border) && decoded[border - 1] == 0.5f);
    }
    // The words are the CPU's.
    Bytes damaged = payload;
    damaged[first + offsetof(ChunkHeader, data_type)] = 4;
    std::vector<float> decoded(elements);
    CHECK(cuda::DecodeList(plan, {chunks}, {damaged.data()}, 2.0, {decoded.data()}, "w", nullptr).empty());
    CHECK(cuda::TakeReport().find(
              "was encoded with other settings: data_type=linear, block_size=" + std::to_string(block_size) +
              ", this worker uses data_type=dynamic_tree") != std::string::npos);
  }
}

// An empty chunk is a header alone, and is looked at like the others.
void EmptyChunksAreChecked() {
  const std::vector<TensorInfo> infos = {{DType::kFloat16, {0}, 0}};
  const Plan plan{MakeSpec(1, 64), Layout(infos, 64, 1, 1), infos, ScalarBackend()};
  const auto chunks = SliceOfAllChunks(plan.layout, 0);
  Bytes payload(kHeaderBytes);
  CHECK(cuda::EncodeList(plan, chunks, 0, {nullptr}, payload.data(), nullptr).empty());
  CHECK(CheckReduced(plan, chunks, 0, payload.data(), kHeaderBytes).empty());
  payload[0] ^= 1;
  CHECK(cuda::DecodeList(plan, {chunks}, {payload.data()}, 1.0, {nullptr}, "w", nullptr).empty());
  CHECK(cuda::TakeReport().find("is no hvd8bit chunk") != std::string::npos);
}

void SizesAreCheckedOnTheHost() {
  const std::vector<TensorInfo> infos = {{DType::kFloat32, {100}, 100}};
  const Plan plan{MakeSpec(1, 64), Layout(infos, 64, 2, 1), infos, ScalarBackend()};
  const auto chunks = SliceOfAllChunks(plan.layout, 0);
  const int64_t bytes = chunks[0].Bytes();
  CHECK(CheckShardSizes(plan, chunks[0], 2 * bytes, {bytes, bytes}).empty());
  CHECK(CheckShardSizes(plan, chunks[0], 2 * bytes, {bytes}).find("of 1 workers were received where 2") !=
        std::string::npos);
  CHECK(CheckShardSizes(plan, chunks[0], 2 * bytes, {bytes, bytes + 1})
            .find("worker 1 is truncated or oversized") != std::string::npos);
  CHECK(CheckShardSizes(plan, chunks[0], 2 * bytes - 1, {bytes, bytes})
            .find("payload is truncated or oversized") != std::string::npos);
  CHECK(!CheckReducedSize(chunks, 1).empty());
}

// Where the host has no memory for reports, the kernels run all the same: the error is not taken for theirs.
void MemoryThatIsNotThereLeavesNoError() {
  void* memory = nullptr;
  CHECK(cuda::AllocateHostMemory(int64_t{1} << 50, &memory) != 0);
  Agree(List({100}), MakeSpec(1, 64), 1, 1);
}

void TablesFit() {
  for (int data_type = 1; data_type <= NumberOfDataTypes(); ++data_type) {
    CHECK(GetCodebook(data_type).buckets.size() <= static_cast<size_t>(cuda::kMostBuckets));
  }
}

}  // namespace
}  // namespace hvd8bit

int main() {
  hvd8bit::TablesFit();
  hvd8bit::SizesAreCheckedOnTheHost();
  hvd8bit::MemoryThatIsNotThereLeavesNoError();
  hvd8bit::ChunksThatDoNotFitBecomeNan();
  hvd8bit::EmptyChunksAreChecked();
  hvd8bit::OrdinaryNumbersAgree();
  hvd8bit::ExchangesAgree();
  hvd8bit::LongListsAgree();
  std::printf("passed\n");
}
