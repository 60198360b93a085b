// Micro-benchmarks of the CPU kernels, for those who tune them, on Google Benchmark: one block after another,
// on one thread, as a tensor is encoded. `tests/cc/benchmark.sh` builds and runs it; its arguments are the
// harness's, e.g.
// --benchmark_filter=encode/avx512 --benchmark_repetitions=9. A back end whose bytes are not the scalar one's
// is not timed.
#include <benchmark/benchmark.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "tf_ops/codec/codebook.h"
#include "tf_ops/codec/cpu/backend.h"

namespace hvd8bit {
namespace {

constexpr int64_t kBlock = 1024;
constexpr int64_t kWorkers = 4;

// Normal numbers, their codes and scales, and room for results.
struct Data {
  std::vector<float> x, scales, decoded;
  std::vector<uint8_t> codes, out_codes;
  const Codebook& book;

  Data(int64_t n, int data_type)
      : x(n), scales(n / kBlock), decoded(n), codes(n), out_codes(n), book(GetCodebook(data_type)) {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    for (float& value : x) {
      value = normal(random);
    }
    Encode(*ScalarBackend(), codes.data());
  }

  void Encode(const Backend& backend, uint8_t* to, bool stochastic = false) {
    for (size_t block = 0; block < scales.size(); ++block) {
      const int64_t start = static_cast<int64_t>(block) * kBlock;
      const Dither dither{1, start};
      backend.encode(DType::kFloat32, x.data(), start, kBlock, book, 0.f, stochastic ? &dither : nullptr,
                     to + start, &scales[block]);
    }
  }

  void Decode(const Backend& backend, bool stream) {
    for (size_t block = 0; block < scales.size(); ++block) {
      const int64_t start = static_cast<int64_t>(block) * kBlock;
      backend.decode(DType::kFloat32, codes.data() + start, scales[block], kBlock, book, decoded.data(),
                     start, stream);
    }
  }

  void Sum(const Backend& backend) {
    for (size_t block = 0; block < scales.size(); ++block) {
      const int64_t start = static_cast<int64_t>(block) * kBlock;
      const uint8_t* from[kWorkers];
      float from_scales[kWorkers], scale;
      for (int64_t worker = 0; worker < kWorkers; ++worker) {
        from[worker] = codes.data() + start;
        from_scales[worker] = scales[block];
      }
      backend.sum_and_encode(from, from_scales, kWorkers, kBlock, book, 0.f, nullptr,
                             out_codes.data() + start, &scale);
      benchmark::DoNotOptimize(scale);
    }
  }
};

void Verify(const Backend& backend, int data_type) {
  Data data(16 * kBlock, data_type);
  data.Encode(backend, data.out_codes.data());
  bool same = data.out_codes == data.codes;
  data.Encode(*ScalarBackend(), data.out_codes.data(), true);
  const std::vector<uint8_t> random = data.out_codes;
  data.Encode(backend, data.out_codes.data(), true);
  same = same && random == data.out_codes;
  data.Decode(*ScalarBackend(), false);
  const std::vector<float> decoded = data.decoded;
  data.Decode(backend, false);
  same = same && std::memcmp(decoded.data(), data.decoded.data(), decoded.size() * sizeof(float)) == 0;
  data.Sum(*ScalarBackend());
  const std::vector<uint8_t> sum = data.out_codes;
  data.Sum(backend);
  if (!same || sum != data.out_codes) {
    std::fprintf(stderr, "%s gives other bytes than scalar for %s\n", backend.name,
                 DataTypeName(data_type).c_str());
    std::exit(1);
  }
}

void Count(benchmark::State& state, int64_t n, int64_t bytes) {
  state.SetItemsProcessed(state.iterations() * n);
  state.SetBytesProcessed(state.iterations() * bytes);
}

void Register(const std::string& name, int64_t n, int data_type, int64_t bytes,
              const std::function<void(Data&)>& work) {
  benchmark::RegisterBenchmark(name.c_str(), [=](benchmark::State& state) {
    Data data(n, data_type);
    for (auto _ : state) {
      work(data);
      benchmark::ClobberMemory();
    }
    Count(state, n, bytes);
  });
}

void RegisterAll() {
  for (const int64_t n :
       {int64_t{64} << 10, int64_t{24} << 20}) {  // in the second-level cache, and out of all
    const std::string size = n < 1 << 20 ? "in_cache" : "out_of_cache";
    Register("memcpy/" + size, n, 1, 8 * n, [](Data& data) {
      std::memcpy(data.decoded.data(), data.x.data(), data.x.size() * sizeof(float));
    });
    std::stringstream names(RunnableBackends());
    for (std::string name; std::getline(names, name, ',');) {
      const Backend& backend = *FindBackend(name);
      for (int data_type = 1; data_type <= NumberOfDataTypes(); ++data_type) {
        Verify(backend, data_type);
        const std::string suffix = name + "/" + DataTypeName(data_type) + "/" + size;
        const bool stream = n > 1 << 20;
        Register("encode/" + suffix, n, data_type, 5 * n,
                 [&](Data& data) { data.Encode(backend, data.out_codes.data()); });
        Register("encode_stochastic/" + suffix, n, data_type, 5 * n,
                 [&](Data& data) { data.Encode(backend, data.out_codes.data(), true); });
        Register("decode/" + suffix, n, data_type, 5 * n,
                 [&backend, stream](Data& data) { data.Decode(backend, stream); });
        Register("sum_of_4/" + suffix, n, data_type, 5 * n, [&](Data& data) { data.Sum(backend); });
      }
    }
  }
}

}  // namespace
}  // namespace hvd8bit

int main(int argc, char** argv) {
  hvd8bit::RegisterAll();
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) {
    return 2;
  }
  benchmark::RunSpecifiedBenchmarks();
}
