// AVX2: 8 elements at a time; the encoder gathers its table from L1.
#include <cstring>
#include <type_traits>

#include "tf_ops/codec/cpu/backend.h"
#include "tf_ops/codec/float_types.h"

#if defined(__x86_64__)
#include <immintrin.h>

// After all includes: what they define inline must run on every CPU, wherever the linker takes it from.
#pragma GCC push_options
#pragma GCC target("avx2,f16c")

namespace hvd8bit {
namespace avx2 {
namespace {

#include "tf_ops/codec/cpu/portable.inc"

constexpr int64_t kLanes = 8;

uint32_t AbsMaxBits(const float* x, int64_t n) {
  const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
  __m256i most[4] = {};
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
    for (int j = 0; j < 4; ++j) {
      const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i + j * kLanes));
      most[j] = _mm256_max_epu32(most[j], _mm256_and_si256(bits, magnitude));
    }
  }
  const __m256i all =
      _mm256_max_epu32(_mm256_max_epu32(most[0], most[1]), _mm256_max_epu32(most[2], most[3]));
  alignas(32) float lanes[kLanes];
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), all);
  const uint32_t vector = PortableAbsMaxBits(lanes, kLanes);
  const uint32_t rest = PortableAbsMaxBits(x + i, n - i);
  return vector > rest ? vector : rest;
}

// 8 codes, one in the low byte of each lane.
inline __m256i Codes(const float* x, __m256 scale, const Codebook& book) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
  const __m256 magnitude = _mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff)));
  const __m256 y = _mm256_min_ps(_mm256_div_ps(magnitude, scale), _mm256_set1_ps(1.f));
  const __m256i y_bits = _mm256_castps_si256(y);
  const __m256i bucket =
      _mm256_max_epi32(_mm256_sub_epi32(_mm256_srli_epi32(y_bits, Codebook::kBucketShift),
                                        _mm256_set1_epi32(static_cast<int>(book.first_bucket))),
                       _mm256_setzero_si256());
  const int* table = reinterpret_cast<const int*>(book.buckets.data());
  const __m256i threshold = _mm256_i32gather_epi32(table, bucket, 8);
  const __m256i below_and_step = _mm256_i32gather_epi32(table + 1, bucket, 8);
  // As signed numbers: a bucket without a threshold has -1 there, below everything, and a step of 0.
  const __m256i above = _mm256_cmpgt_epi32(y_bits, threshold);
  const __m256i step = _mm256_and_si256(_mm256_srli_epi32(below_and_step, 8), above);
  const __m256i index = _mm256_and_si256(_mm256_add_epi32(below_and_step, step), _mm256_set1_epi32(0x7f));
  const __m256i sign = _mm256_and_si256(_mm256_srli_epi32(bits, 24), _mm256_set1_epi32(kSignBit));
  const __m256i zero = _mm256_cmpeq_epi32(index, _mm256_setzero_si256());
  return _mm256_or_si256(index, _mm256_andnot_si256(zero, sign));
}

void EncodeFloats(const float* x, int64_t n, float scale, const Codebook& book, uint8_t* codes) {
  const __m256 scales = _mm256_set1_ps(scale);
  // What packing within 128-bit halves does to the order of groups of 4, undone.
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
    const __m256i low = _mm256_packus_epi32(Codes(x + i, scales, book), Codes(x + i + kLanes, scales, book));
    const __m256i high =
        _mm256_packus_epi32(Codes(x + i + 2 * kLanes, scales, book), Codes(x + i + 3 * kLanes, scales, book));
    const __m256i packed = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(low, high), order);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes + i), packed);
  }
  PortableEncodeFloats(x + i, n - i, scale, book, codes + i);
}

void EncodeStochastic(const float* x, int64_t n, float scale, const Codebook& book, Dither dither,
                      uint8_t* codes) {
  PortableEncodeStochastic(x, n, scale, book, dither, codes);
}

// Element by element: on the CPUs that stop at AVX2 eight loads are faster than a gather.
void DecodeFloats(const uint8_t* codes, int64_t n, float scale, const Codebook& book, float* out,
                  bool stream) {
  if (!stream || reinterpret_cast<uintptr_t>(out) % sizeof(__m256) != 0) {
    return PortableDecodeFloats(codes, n, scale, book, out);
  }
  constexpr int64_t kLine = 256;
  alignas(32) float line[kLine];
  for (int64_t at = 0; at < n; at += kLine) {
    const int64_t count = n - at < kLine ? n - at : kLine;
    PortableDecodeFloats(codes + at, count, scale, book, line);
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
      _mm256_stream_ps(out + at + i, _mm256_load_ps(line + i));
    }
    std::memcpy(out + at + i, line + i, (count - i) * sizeof(float));
  }
}

void AddDecoded(const uint8_t* codes, int64_t n, float scale, const Codebook& book, float* sum) {
  PortableAddDecoded(codes, n, scale, book, sum);
}

#include "tf_ops/codec/cpu/kernels.inc"

bool Supported() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c"); }

}  // namespace
}  // namespace avx2

const Backend* Avx2Backend() {
  static const Backend backend{"avx2", avx2::Supported, avx2::Encode, avx2::Decode, avx2::SumAndEncode};
  return &backend;
}

}  // namespace hvd8bit

#pragma GCC pop_options

#else

namespace hvd8bit {
const Backend* Avx2Backend() { return nullptr; }
}  // namespace hvd8bit

#endif
