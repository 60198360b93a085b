// Payloads that a careless or hostile peer might send, in any number: what is good is encoded, then damaged,
// and goes through the checks, and what they let pass through sum and decoding. To be built with sanitizers:
// nothing may be read or written out of bounds, and a payload is either refused with a message or gives what
// it must.
//
//   fuzz COUNT SEED    the same payloads for the same seed; prints a line of JSON
#include <chrono>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "tests/cc/harness.h"
#include "tf_ops/codec/codebook.h"
#include "tf_ops/codec/cpu/backend.h"
#if defined(HVD8BIT_CUDA)
#include "tf_ops/codec/cuda/lists.h"
#endif

namespace hvd8bit {
namespace {

void OnThisThread(int64_t units, int64_t /*cost*/, const std::function<void(int64_t, int64_t)>& fn) {
  fn(0, units);
}

struct Counts {
  int64_t payloads = 0, refused = 0, accepted = 0, on_cuda = 0;
};

// A list, settings, and what good workers send for it.
class Scene {
 public:
  Scene() : list_(Sizes()), plan_(RandomPlan()), chunks_(SliceOfAllChunks(plan_.layout, slice_)) {
    int64_t bytes = 0;
    for (const auto& chunk : chunks_) {
      sizes_.push_back(chunk.Bytes());
      bytes += chunk.Bytes();
    }
    payload_.resize(bytes);
    EncodeList(plan_, chunks_, slice_, list_.data, payload_.data(), OnThisThread);
  }

  // One payload, damaged or not: as one that comes out of alltoall, or out of allgather.
  void Try(Counts* counts) {
    const bool reduce = RandomUpTo(1) == 1;
    const int64_t shard = RandomUpTo(plan_.layout.shards() - 1);
    Bytes bytes;
    std::vector<int64_t> sizes = sizes_;
    if (reduce) {
      const auto start =
          payload_.begin() + std::accumulate(sizes_.begin(), sizes_.begin() + shard, int64_t{0});
      sizes.assign(sizes_.size(), sizes_[shard]);
      for (size_t worker = 0; worker < sizes.size(); ++worker) {
        bytes.insert(bytes.end(), start, start + sizes_[shard]);
      }
    } else {
      bytes = payload_;
    }
    const Bytes good = bytes;
    const std::vector<int64_t> good_sizes = sizes;
    Damage(&bytes, &sizes);

    const auto exact = Exact(bytes);
    const auto size = static_cast<int64_t>(bytes.size());
    const std::string error =
        reduce ? CheckShards(plan_, chunks_[shard], shard, slice_, exact.get(), size, sizes)
               : CheckReduced(plan_, chunks_, slice_, exact.get(), size);
    // Whole headers at their places are all that may pass, and they must.
    const bool sound = bytes.size() == good.size() && (!reduce || sizes == good_sizes) &&
                       HeadersEqual(bytes, good, reduce ? good_sizes : sizes_);
    CHECK(error.empty() == sound);
    ++counts->payloads;
    ++(sound ? counts->accepted : counts->refused);
    if (sound) {
      Use(reduce, shard, exact.get(), counts);
    }
  }

 private:
  static std::vector<int64_t> Sizes() {
    std::vector<int64_t> sizes(1 + RandomUpTo(4));
    for (int64_t& size : sizes) {
      size = RandomUpTo(3) == 0 ? RandomUpTo(3) : RandomUpTo(200);
    }
    return sizes;
  }

  Plan RandomPlan() {
    static const int64_t kBlockSizes[] = {0, 64, 128, 192, 4160, 65536};
    const float fixed[] = {0.f, 0.f, 1.f, 1e-30f, 1.5e31f};
    const Spec spec{static_cast<uint8_t>(1 + RandomUpTo(NumberOfDataTypes() - 1)), kBlockSizes[RandomUpTo(5)],
                    fixed[RandomUpTo(4)], RandomUpTo(2) == 0 ? Rounding::kStochastic : Rounding::kNearest};
    const int64_t slices = 1 + RandomUpTo(3);
    slice_ = RandomUpTo(slices - 1);
    const char* names[] = {"scalar", "avx2", "avx512"};
    const Backend* backend = FindBackend(names[RandomUpTo(2)]);
    return MakePlan(spec, list_, 1 + RandomUpTo(3), slices, backend != nullptr ? backend : ScalarBackend());
  }

  static bool HeadersEqual(const Bytes& a, const Bytes& b, const std::vector<int64_t>& sizes) {
    int64_t at = 0;
    for (int64_t size : sizes) {
      if (!std::equal(a.begin() + at, a.begin() + at + kHeaderBytes, b.begin() + at)) {
        return false;
      }
      at += size;
    }
    return true;
  }

  void Damage(Bytes* bytes, std::vector<int64_t>* sizes) {
    const auto place = [&] { return RandomUpTo(static_cast<int64_t>(bytes->size()) - 1); };
    for (int64_t left = RandomUpTo(3); left > 0; --left) {
      if (bytes->empty()) {
        return;
      }
      switch (RandomUpTo(9)) {
        case 0:
          (*bytes)[place()] ^= static_cast<uint8_t>(1 << RandomUpTo(7));
          break;
        case 1:
          (*bytes)[place()] = static_cast<uint8_t>(random_bits());
          break;
        case 2:  // a header's byte
          (*bytes)[RandomUpTo(std::min<int64_t>(kHeaderBytes, bytes->size()) - 1)] ^=
              static_cast<uint8_t>(1 << RandomUpTo(7));
          break;
        case 3:
          bytes->resize(place());
          break;
        case 4:
          bytes->resize(bytes->size() + RandomUpTo(100), static_cast<uint8_t>(random_bits()));
          break;
        case 5: {  // a part over another
          const int64_t from = place(), to = place();
          const int64_t length = std::min<int64_t>(RandomUpTo(80), bytes->size() - std::max(from, to));
          std::vector<uint8_t> part(bytes->begin() + from, bytes->begin() + from + length);
          std::copy(part.begin(), part.end(), bytes->begin() + to);
          break;
        }
        case 6:
          (*sizes)[RandomUpTo(sizes->size() - 1)] =
              RandomUpTo(1) ? RandomUpTo(2000) : static_cast<int32_t>(random_bits());
          break;
        case 7:
          sizes->resize(RandomUpTo(5), RandomUpTo(300));
          if (sizes->empty()) {
            return;
          }
          break;
        case 8:  // everything
          for (uint8_t& byte : *bytes) {
            byte = static_cast<uint8_t>(random_bits());
          }
          break;
        default: {  // codes and scales of the first chunk: any will do
          const int64_t end = std::min<int64_t>(sizes_[0], bytes->size());
          for (int64_t at = kHeaderBytes; at < end; ++at) {
            (*bytes)[at] = static_cast<uint8_t>(random_bits());
          }
        }
      }
    }
  }

  void Use(bool reduce, int64_t shard, const uint8_t* payload, Counts* counts) {
    const bool on_cuda = counts->accepted % 64 == 0;
    if (reduce) {
      const auto reduced = Exact(Bytes(chunks_[shard].Bytes(), 0xa5));
      ReduceShards(plan_, chunks_[shard], shard, slice_, payload, reduced.get(), OnThisThread);
      CHECK(CheckReduced(plan_, {chunks_[shard]}, slice_, reduced.get(), chunks_[shard].Bytes()).empty() ||
            shard > 0);
      const auto sum = Exact(Bytes(ElementsOf(plan_, chunks_[shard]).count * sizeof(float), 0xa5));
      SumShards(plan_, chunks_[shard], payload, reinterpret_cast<float*>(sum.get()), OnThisThread);
#if defined(HVD8BIT_CUDA)
      if (on_cuda) {
        const auto again = Exact(Bytes(chunks_[shard].Bytes(), 0x5a));
        CHECK(cuda::ReduceShards(plan_, chunks_[shard], shard, slice_, payload, again.get(), "", nullptr)
                  .empty());
        CHECK(std::equal(again.get(), again.get() + chunks_[shard].Bytes(), reduced.get()));
        ++counts->on_cuda;
      }
#endif
    } else if (plan_.layout.slices() == 1) {
      std::vector<void*> out;
      const auto results = list_.Results(&out);
      const double factors[] = {1., -3e38, 1e-300, 0.};
      const double factor = factors[RandomUpTo(3)];
      DecodeList(plan_, chunks_, payload, factor, out, OnThisThread);
#if defined(HVD8BIT_CUDA)
      if (on_cuda) {
        std::vector<void*> out_again;
        const auto again = list_.Results(&out_again);
        CHECK(cuda::DecodeList(plan_, {chunks_}, {payload}, factor, out_again, "", nullptr).empty());
        ++counts->on_cuda;
      }
#endif
    }
    (void)on_cuda;
  }

  List list_;
  int64_t slice_ = 0;
  Plan plan_;
  std::vector<Layout::Chunk> chunks_;
  std::vector<int64_t> sizes_;
  Bytes payload_;
};

}  // namespace
}  // namespace hvd8bit

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: fuzz COUNT SEED\n");
    return 2;
  }
  const int64_t count = std::atoll(argv[1]);
  hvd8bit::random_bits.seed(std::strtoull(argv[2], nullptr, 10));
  const auto start = std::chrono::steady_clock::now();
  hvd8bit::Counts counts;
  while (counts.payloads < count) {
    hvd8bit::Scene scene;
    for (int i = 0; i < 100 && counts.payloads < count; ++i) {
      scene.Try(&counts);
    }
  }
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  std::printf("{\"payloads\": %" PRId64 ", \"seed\": %s, \"refused\": %" PRId64 ", \"accepted\": %" PRId64
              ", \"on_emulated_cuda\": %" PRId64 ", \"seconds\": %.1f}\n",
              counts.payloads, argv[2], counts.refused, counts.accepted, counts.on_cuda, seconds);
}
