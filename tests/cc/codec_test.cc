// The codec without TensorFlow, to be built with sanitizers: every back end there and back over edge cases,
// and whatever bytes a peer may send into the checks. What the numbers must be, the Python tests know; here
// the back ends must agree.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <sstream>
#include <string>
#include <vector>

#include "tests/cc/harness.h"
#include "tf_ops/codec/codebook.h"
#include "tf_ops/codec/cpu/backend.h"

namespace hvd8bit {
namespace {

std::vector<const Backend*> Backends() {
  std::vector<const Backend*> backends;
  std::stringstream names(RunnableBackends());
  for (std::string name; std::getline(names, name, ',');) {
    backends.push_back(FindBackend(name));
    CHECK(backends.back() != nullptr);
  }
  return backends;
}

void BackEndsAgreeOverEdgeCases() {
  std::vector<std::vector<int64_t>> lists = {
      {0}, {1}, {0, 0, 5}, {64, 64}, {63, 65, 1, 0, 127}, {4097, 3, 1000, 70000}, {1, 1, 1, 1, 1, 1}};
  for (int64_t length = 1; length < 3 * 64 + 2; length += 7) {
    lists.push_back({length, 193 - length});
  }
  for (const auto& sizes : lists) {
    const List list(sizes);
    for (int data_type = 1; data_type <= NumberOfDataTypes(); ++data_type) {
      for (int64_t block_size : {64, 192, 65536, 0}) {
        const Spec spec{static_cast<uint8_t>(data_type), block_size, data_type == 3 ? 150.f : 0.f,
                        data_type == 2 ? Rounding::kStochastic : Rounding::kNearest};
        const int64_t shards = 1 + RandomUpTo(4), slices = 1 + RandomUpTo(2);
        const Bytes expected = Exchange(Steps(), MakePlan(spec, list, shards, slices, ScalarBackend()), list);
        for (const Backend* backend : Backends()) {
          CHECK(Exchange(Steps(), MakePlan(spec, list, shards, slices, backend), list) == expected);
        }
      }
    }
  }
}

// What a block with a bad number gives, and one with none: in each place of a block, of all back ends.
void NonFiniteNumbersSpoilTheirBlock() {
  for (const Backend* backend : Backends()) {
    for (int64_t at = 0; at < 130; ++at) {
      for (float bad : {std::numeric_limits<float>::infinity(), std::nanf("")}) {
        std::vector<float> x(130, 2.f), decoded(130);
        x[at] = bad;
        Bytes codes(130);
        float scale;
        backend->encode(DType::kFloat32, x.data(), 0, 130, GetCodebook(1), 0.f, nullptr, codes.data(),
                        &scale);
        CHECK(FloatBits(scale) == 0x7fc00000u);
        backend->decode(DType::kFloat32, codes.data(), scale, 130, GetCodebook(1), decoded.data(), 0, false);
        for (float value : decoded) {
          CHECK(std::isnan(value));
        }
        x[at] = -2.f;
        backend->encode(DType::kFloat32, x.data(), 0, 130, GetCodebook(1), 0.f, nullptr, codes.data(),
                        &scale);
        CHECK(scale == 2.f && codes[at] == 255 && codes[(at + 1) % 130] == 127);
      }
    }
  }
}

// Memory that ends where a page begins that nobody may touch: sanitizers do not look into masked loads and
// stores.
class ToTheEdge {
 public:
  explicit ToTheEdge(int64_t bytes) : size_(bytes) {
    const int64_t page = sysconf(_SC_PAGESIZE), mine = (bytes + page - 1) / page * page;
    void* memory = mmap(nullptr, mine + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    edge_ = static_cast<uint8_t*>(memory) + mine;
    CHECK(mprotect(edge_, page, PROT_NONE) == 0);
  }
  // The last `bytes` before the edge.
  uint8_t* Last(int64_t bytes) const {
    CHECK(bytes <= size_);
    return edge_ - bytes;
  }

 private:
  int64_t size_;
  uint8_t* edge_;
};

void BackEndsKeepToTheirPages() {
  constexpr int64_t kMost = 150;
  const ToTheEdge numbers(kMost * sizeof(float)), codes(kMost), sums(kMost), decoded(kMost * sizeof(float));
  const Dither dither{1, 2};
  for (const Backend* backend : Backends()) {
    for (int64_t n = 1; n <= kMost; ++n) {
      for (const Dither* rounding : {static_cast<const Dither*>(nullptr), &dither}) {
        const Codebook& book = GetCodebook(1 + n % NumberOfDataTypes());
        auto* x = reinterpret_cast<float*>(numbers.Last(n * sizeof(float)));
        for (int64_t i = 0; i < n; ++i) {
          x[i] = static_cast<float>(i - n / 2);
        }
        float scale, sum_scale;
        backend->encode(DType::kFloat32, x, 0, n, book, 0.f, rounding, codes.Last(n), &scale);
        const uint8_t* both[] = {codes.Last(n), codes.Last(n)};
        const float scales[] = {scale, scale};
        backend->sum_and_encode(both, scales, 2, n, book, 0.f, rounding, sums.Last(n), &sum_scale);
        CHECK(sum_scale == 2 * scale && (rounding != nullptr || *sums.Last(n) == *codes.Last(n)));
        for (bool stream : {false, true}) {
          backend->decode(DType::kFloat32, codes.Last(n), scale, n, book, decoded.Last(n * sizeof(float)), 0,
                          stream);
        }
      }
    }
  }
}

struct Received {
  Bytes bytes;
  std::vector<int64_t> sizes;
};

// True if both checks let `received` pass; nothing else may happen. What passes is reduced and decoded.
bool Digest(const Plan& plan, const List& list, int64_t shard, const Received& received) {
  const auto exact = Exact(received.bytes);
  const auto bytes = static_cast<int64_t>(received.bytes.size());
  const Layout::Chunk chunk = plan.layout.GetChunk(shard, 0);
  const bool reducible = CheckShards(plan, chunk, shard, 0, exact.get(), bytes, received.sizes).empty();
  if (reducible) {
    Bytes reduced(chunk.Bytes());
    ReduceShards(plan, chunk, shard, 0, exact.get(), reduced.data(), Threads);
    std::vector<float> sum(ElementsOf(plan, chunk).count);
    SumShards(plan, chunk, exact.get(), sum.data(), Threads);
  }
  const auto chunks = SliceOfAllChunks(plan.layout, 0);
  const bool decodable = CheckReduced(plan, chunks, 0, exact.get(), bytes).empty();
  if (decodable) {
    std::vector<void*> out;
    const auto results = list.Results(&out);
    DecodeList(plan, chunks, exact.get(), -3e38, out, Threads);
  }
  return reducible || decodable;
}

// What three workers that encoded the same `payload` send for one chunk.
Received FromThreeWorkers(const Bytes& payload, const std::vector<int64_t>& sizes, int64_t shard) {
  const auto start = payload.begin() + std::accumulate(sizes.begin(), sizes.begin() + shard, int64_t{0});
  Received received;
  for (int worker = 0; worker < 3; ++worker) {
    received.bytes.insert(received.bytes.end(), start, start + sizes[shard]);
    received.sizes.push_back(sizes[shard]);
  }
  return received;
}

void AnyBytesAreRefusedOrDecoded() {
  const List list({70, 65, 0, 300});
  const Spec spec{4, 64, 0.f, Rounding::kNearest};
  for (const Backend* backend : Backends()) {
    const Plan plan = MakePlan(spec, list, 3, 1, backend);
    std::vector<int64_t> sizes;
    const Bytes payload = Encode(Steps(), plan, list, 0, &sizes);
    CHECK(Digest(plan, list, 0, {payload, sizes}));  // as the payload of decode

    // Cut at every length, with sizes that promise more, and with honest ones.
    const auto cut_at_every_length = [&](const Received& whole, int64_t shard) {
      for (size_t length = 0; length < whole.bytes.size(); ++length) {
        Received cut{{whole.bytes.begin(), whole.bytes.begin() + length}, whole.sizes};
        CHECK(!Digest(plan, list, shard, cut));
        auto left = static_cast<int64_t>(length);
        for (int64_t& size : cut.sizes) {
          size = std::min(size, left);
          left -= size;
        }
        CHECK(!Digest(plan, list, shard, cut));
      }
    };
    cut_at_every_length({payload, sizes}, 0);
    cut_at_every_length(FromThreeWorkers(payload, sizes, 1), 1);
    int64_t chunk = 0;
    for (int64_t size : sizes) {
      for (int64_t bit = 0; bit < 8 * kHeaderBytes; ++bit) {
        Bytes damaged = payload;
        damaged[chunk + bit / 8] ^= 1 << bit % 8;
        CHECK(!Digest(plan, list, 0, {damaged, sizes}));
      }
      chunk += size;
    }
    for (int round = 0; round < 3000; ++round) {
      Received random;
      random.bytes.resize(RandomUpTo(1000));
      for (uint8_t& byte : random.bytes) {
        byte = static_cast<uint8_t>(random_bits());
      }
      random.sizes.resize(RandomUpTo(4));
      for (int64_t& size : random.sizes) {
        size = RandomUpTo(1) ? RandomUpTo(1000) : static_cast<int32_t>(random_bits());
      }
      CHECK(!Digest(plan, list, RandomUpTo(2), random));
    }
    // Behind good headers any codes and scales.
    for (int round = 0; round < 300; ++round) {
      const int64_t shard = RandomUpTo(2);
      Received noise{payload, sizes};
      if (round % 2 == 0) {
        noise = FromThreeWorkers(payload, sizes, shard);
      }
      int64_t at = 0;
      for (int64_t size : noise.sizes) {
        for (int64_t byte = kHeaderBytes; byte < size; ++byte) {
          noise.bytes[at + byte] = static_cast<uint8_t>(random_bits());
        }
        at += size;
      }
      CHECK(Digest(plan, list, shard, noise));
    }
  }
}

}  // namespace
}  // namespace hvd8bit

int main() {
  hvd8bit::BackEndsAgreeOverEdgeCases();
  hvd8bit::NonFiniteNumbersSpoilTheirBlock();
  hvd8bit::BackEndsKeepToTheirPages();
  hvd8bit::AnyBytesAreRefusedOrDecoded();
  std::printf("passed with %s\n", hvd8bit::RunnableBackends().c_str());
}
