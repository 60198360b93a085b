// AVX-512: 16 elements at a time; tables stay in registers, so nothing is gathered.
#include <cstring>
#include <type_traits>

#include "tf_ops/codec/cpu/backend.h"
#include "tf_ops/codec/float_types.h"

#if defined(__x86_64__)
#include <immintrin.h>

// GCC 12 takes the "undefined" operands of its own intrinsics for ours.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"

// After all includes: what they define inline must run on every CPU, wherever the linker takes it from.
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,f16c")

namespace hvd8bit {
namespace avx512 {
namespace {

constexpr int64_t kLanes = 16;

uint32_t AbsMaxBits(const float* x, int64_t n) {
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  __m512i most[4] = {};
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
    for (int j = 0; j < 4; ++j) {
      most[j] =
          _mm512_max_epu32(most[j], _mm512_and_si512(_mm512_loadu_si512(x + i + j * kLanes), magnitude));
    }
  }
  for (; i < n; i += kLanes) {
    const __mmask16 left = n - i < kLanes ? (1u << (n - i)) - 1 : 0xffff;
    most[0] = _mm512_max_epu32(most[0], _mm512_and_si512(_mm512_maskz_loadu_epi32(left, x + i), magnitude));
  }
  return _mm512_reduce_max_epu32(
      _mm512_max_epu32(_mm512_max_epu32(most[0], most[1]), _mm512_max_epu32(most[2], most[3])));
}

// The thresholds between neighbouring codes as a search tree of seven levels, level by level.
struct SearchTree {
  __m512 root, level1, level2, level3, level4, level5[2], level6[4];

  explicit SearchTree(const Codebook& book) {
    const float* t = book.tree.data();
    root = _mm512_set1_ps(t[0]);
    level1 = _mm512_maskz_loadu_ps(0x0003, t + 1);
    level2 = _mm512_maskz_loadu_ps(0x000f, t + 3);
    level3 = _mm512_maskz_loadu_ps(0x00ff, t + 7);
    level4 = _mm512_loadu_ps(t + 15);
    for (int i = 0; i < 2; ++i) {
      level5[i] = _mm512_loadu_ps(t + 31 + i * kLanes);
    }
    for (int i = 0; i < 4; ++i) {
      level6[i] = _mm512_loadu_ps(t + 63 + i * kLanes);
    }
  }

  // Number of thresholds below each y: its index.
  __m512i Index(__m512 y) const {
    const __m512i one = _mm512_set1_epi32(1);
    const auto descend = [&](__m512i at, __m512 threshold) {
      const __m512i twice = _mm512_add_epi32(at, at);
      return _mm512_mask_or_epi32(twice, _mm512_cmp_ps_mask(y, threshold, _CMP_GT_OQ), twice, one);
    };
    __m512i at = _mm512_maskz_mov_epi32(_mm512_cmp_ps_mask(y, root, _CMP_GT_OQ), one);
    at = descend(at, _mm512_permutexvar_ps(at, level1));
    at = descend(at, _mm512_permutexvar_ps(at, level2));
    at = descend(at, _mm512_permutexvar_ps(at, level3));
    at = descend(at, _mm512_permutexvar_ps(at, level4));
    at = descend(at, _mm512_permutex2var_ps(level5[0], at, level5[1]));
    const __m512 low = _mm512_permutex2var_ps(level6[0], at, level6[1]);
    const __m512 high = _mm512_permutex2var_ps(level6[2], at, level6[3]);
    return descend(at, _mm512_mask_blend_ps(_mm512_test_epi32_mask(at, _mm512_set1_epi32(32)), low, high));
  }
};

inline __m512i Codes(__m512i bits, __m512 scale, const SearchTree& tree) {
  const __m512i sign_bit = _mm512_set1_epi32(static_cast<int>(0x80000000u));
  const __m512 magnitude = _mm512_castsi512_ps(_mm512_andnot_si512(sign_bit, bits));
  const __m512i index =
      tree.Index(_mm512_div_ps(magnitude, scale));  // above 1 the last index comes out by itself
  const __m512i sign = _mm512_and_si512(_mm512_srli_epi32(bits, 24), _mm512_set1_epi32(kSignBit));
  return _mm512_mask_or_epi32(index, _mm512_test_epi32_mask(index, index), index, sign);
}

void EncodeFloats(const float* x, int64_t n, float scale, const Codebook& book, uint8_t* codes) {
  const SearchTree tree(book);
  const __m512 scales = _mm512_set1_ps(scale);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const __m512i coded = Codes(_mm512_loadu_si512(x + i), scales, tree);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + i), _mm512_cvtepi32_epi8(coded));
  }
  if (i < n) {
    const __mmask16 left = (1u << (n - i)) - 1;
    const __m512i coded = Codes(_mm512_maskz_loadu_epi32(left, x + i), scales, tree);
    _mm512_mask_cvtepi32_storeu_epi8(codes + i, left, coded);
  }
}

// The 128 magnitudes in eight registers.
struct Values {
  __m512 magnitudes[8];

  explicit Values(const Codebook& book) {
    for (int i = 0; i < 8; ++i) {
      magnitudes[i] = _mm512_loadu_ps(book.magnitudes.data() + i * kLanes);
    }
  }

  __m512 Decoded(__m128i codes, __m512 scale) const {
    const __m512i code = _mm512_cvtepu8_epi32(codes);
    const __m512 part0 = _mm512_permutex2var_ps(magnitudes[0], code, magnitudes[1]);
    const __m512 part1 = _mm512_permutex2var_ps(magnitudes[2], code, magnitudes[3]);
    const __m512 part2 = _mm512_permutex2var_ps(magnitudes[4], code, magnitudes[5]);
    const __m512 part3 = _mm512_permutex2var_ps(magnitudes[6], code, magnitudes[7]);
    const __mmask16 bit5 = _mm512_test_epi32_mask(code, _mm512_set1_epi32(32));
    const __mmask16 bit6 = _mm512_test_epi32_mask(code, _mm512_set1_epi32(64));
    const __m512 magnitude = _mm512_mask_blend_ps(bit6, _mm512_mask_blend_ps(bit5, part0, part1),
                                                  _mm512_mask_blend_ps(bit5, part2, part3));
    // 0x80 reads as 0, not as -0.
    const __mmask16 nonzero = _mm512_test_epi32_mask(code, _mm512_set1_epi32(0x7f));
    const __m512i sign = _mm512_maskz_slli_epi32(nonzero, _mm512_srli_epi32(code, 7), 31);
    return _mm512_mul_ps(_mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(magnitude), sign)), scale);
  }
};

inline __m128i Load16(const uint8_t* codes) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
}

void DecodeFloats(const uint8_t* codes, int64_t n, float scale, const Codebook& book, float* out,
                  bool stream) {
  const Values values(book);
  const __m512 scales = _mm512_set1_ps(scale);
  int64_t i = 0;
  if (stream && reinterpret_cast<uintptr_t>(out) % sizeof(__m512) == 0) {
    for (; i + kLanes <= n; i += kLanes) {
      _mm512_stream_ps(out + i, values.Decoded(Load16(codes + i), scales));
    }
    _mm_sfence();
  } else {
    for (; i + kLanes <= n; i += kLanes) {
      _mm512_storeu_ps(out + i, values.Decoded(Load16(codes + i), scales));
    }
  }
  if (i < n) {
    const __mmask16 left = (1u << (n - i)) - 1;
    _mm512_mask_storeu_ps(out + i, left, values.Decoded(_mm_maskz_loadu_epi8(left, codes + i), scales));
  }
}

void AddDecoded(const uint8_t* codes, int64_t n, float scale, const Codebook& book, float* sum) {
  const Values values(book);
  const __m512 scales = _mm512_set1_ps(scale);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    _mm512_storeu_ps(sum + i,
                     _mm512_add_ps(_mm512_loadu_ps(sum + i), values.Decoded(Load16(codes + i), scales)));
  }
  if (i < n) {
    const __mmask16 left = (1u << (n - i)) - 1;
    const __m512 decoded = values.Decoded(_mm_maskz_loadu_epi8(left, codes + i), scales);
    _mm512_mask_storeu_ps(sum + i, left, _mm512_add_ps(_mm512_maskz_loadu_ps(left, sum + i), decoded));
  }
}

#include "tf_ops/codec/cpu/kernels.inc"

bool Supported() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

}  // namespace
}  // namespace avx512

const Backend* Avx512Backend() {
  static const Backend backend{"avx512", avx512::Supported, avx512::Encode, avx512::Decode,
                               avx512::SumAndEncode};
  return &backend;
}

}  // namespace hvd8bit

#pragma GCC pop_options

#else

namespace hvd8bit {
const Backend* Avx512Backend() { return nullptr; }
}  // namespace hvd8bit

#endif
