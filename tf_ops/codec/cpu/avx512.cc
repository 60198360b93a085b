// AVX-512: 16 or 32 elements at a time; tables stay in registers, so nothing is gathered.
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
constexpr int64_t kLanes16 = 32;  // of halves

// Where the halves of 32 floats in two registers are, counted in halves.
struct alignas(64) Halves {
  uint16_t odd[kLanes16], even[kLanes16];
  constexpr Halves() : odd(), even() {
    for (int i = 0; i < kLanes16; ++i) {
      even[i] = static_cast<uint16_t>(2 * i);
      odd[i] = static_cast<uint16_t>(2 * i + 1);
    }
  }
};
constexpr Halves kHalves;

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

// The 128 magnitudes in eight registers.
struct Values {
  __m512 magnitudes[8];

  explicit Values(const Codebook& book) {
    for (int i = 0; i < 8; ++i) {
      magnitudes[i] = _mm512_loadu_ps(book.magnitudes.data() + i * kLanes);
    }
  }

  // Of 16 indices.
  __m512 At(__m512i index) const {
    const __m512 part0 = _mm512_permutex2var_ps(magnitudes[0], index, magnitudes[1]);
    const __m512 part1 = _mm512_permutex2var_ps(magnitudes[2], index, magnitudes[3]);
    const __m512 part2 = _mm512_permutex2var_ps(magnitudes[4], index, magnitudes[5]);
    const __m512 part3 = _mm512_permutex2var_ps(magnitudes[6], index, magnitudes[7]);
    const __mmask16 bit5 = _mm512_test_epi32_mask(index, _mm512_set1_epi32(32));
    const __mmask16 bit6 = _mm512_test_epi32_mask(index, _mm512_set1_epi32(64));
    return _mm512_mask_blend_ps(bit6, _mm512_mask_blend_ps(bit5, part0, part1),
                                _mm512_mask_blend_ps(bit5, part2, part3));
  }

  __m512 Decoded(__m128i codes, __m512 scale) const {
    const __m512i code = _mm512_cvtepu8_epi32(codes);
    // 0x80 reads as 0, not as -0.
    const __mmask16 nonzero = _mm512_test_epi32_mask(code, _mm512_set1_epi32(0x7f));
    const __m512i sign = _mm512_maskz_slli_epi32(nonzero, _mm512_srli_epi32(code, 7), 31);
    return _mm512_mul_ps(_mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(At(code)), sign)), scale);
  }
};

// SplitThresholds in registers, for 32 numbers at a time. kSteps: whether thresholds can be equal.
template <bool kSteps>
struct Search {
  __m512i root, level1, level2, level3, level4, level5, level6[2], upper[4], lower[4], step[4];

  explicit Search(const SplitThresholds& split) {
    const uint16_t* t = split.tree.data();
    root = _mm512_set1_epi16(static_cast<int16_t>(t[0]));
    level1 = _mm512_maskz_loadu_epi16(0x0003, t + 1);
    level2 = _mm512_maskz_loadu_epi16(0x000f, t + 3);
    level3 = _mm512_maskz_loadu_epi16(0x00ff, t + 7);
    level4 = _mm512_maskz_loadu_epi16(0xffff, t + 15);
    level5 = _mm512_loadu_si512(t + 31);
    for (int i = 0; i < 2; ++i) {
      level6[i] = _mm512_loadu_si512(t + 63 + i * kLanes16);
    }
    for (int i = 0; i < 4; ++i) {
      upper[i] = _mm512_load_si512(split.upper.data() + i * kLanes16);
      lower[i] = _mm512_load_si512(split.lower.data() + i * kLanes16);
      step[i] = kSteps ? _mm512_load_si512(split.step.data() + i * kLanes16) : _mm512_set1_epi16(1);
    }
  }

  // How many thresholds lie below each y, which is given in halves.
  __m512i Below(__m512i y_upper, __m512i y_lower) const {
    const auto descend = [&](__m512i at, __m512i threshold) {
      // -1 where y is above: cheaper than a comparison, which ends in a mask register.
      const __m512i above = _mm512_srai_epi16(_mm512_sub_epi16(threshold, y_upper), 15);
      return _mm512_sub_epi16(_mm512_add_epi16(at, at), above);
    };
    __m512i at = descend(_mm512_setzero_si512(), root);
    at = descend(at, _mm512_permutexvar_epi16(at, level1));
    at = descend(at, _mm512_permutexvar_epi16(at, level2));
    at = descend(at, _mm512_permutexvar_epi16(at, level3));
    at = descend(at, _mm512_permutexvar_epi16(at, level4));
    at = descend(at, _mm512_permutexvar_epi16(at, level5));
    at = descend(at, _mm512_permutex2var_epi16(level6[0], at, level6[1]));
    const __mmask32 late = _mm512_test_epi16_mask(at, _mm512_set1_epi16(64));
    const auto entry = [&](const __m512i* table) {
      return _mm512_mask_blend_epi16(late, _mm512_permutex2var_epi16(table[0], at, table[1]),
                                     _mm512_permutex2var_epi16(table[2], at, table[3]));
    };
    const __mmask32 same = _mm512_cmpeq_epi16_mask(y_upper, entry(upper));
    const __mmask32 above = _mm512_mask_cmpgt_epu16_mask(same, y_lower, entry(lower));
    return _mm512_mask_add_epi16(at, above, at, kSteps ? entry(step) : step[0]);
  }
};

// 32 numbers: their magnitudes over the scale, as floats and in halves of 16 bits.
struct Quotients {
  __m512 first, second;
  __m512i upper, lower;

  Quotients(__m512i x0, __m512i x1, __m512 scale) {
    const __m512i sign_bit = _mm512_set1_epi32(static_cast<int>(0x80000000u));
    const __m512 one = _mm512_set1_ps(1.f);
    first = _mm512_min_ps(_mm512_div_ps(_mm512_castsi512_ps(_mm512_andnot_si512(sign_bit, x0)), scale), one);
    second = _mm512_min_ps(_mm512_div_ps(_mm512_castsi512_ps(_mm512_andnot_si512(sign_bit, x1)), scale), one);
    const __m512i odd = _mm512_load_si512(kHalves.odd), even = _mm512_load_si512(kHalves.even);
    const __m512i y0 = _mm512_castps_si512(first), y1 = _mm512_castps_si512(second);
    upper = _mm512_permutex2var_epi16(y0, odd, y1);
    lower = _mm512_permutex2var_epi16(y0, even, y1);
  }
};

// The codes of indices, with the signs of x.
inline __m256i WithSigns(__m512i index, __m512i x0, __m512i x1) {
  const __mmask32 negative = _mm512_kunpackw(_mm512_movepi32_mask(x1), _mm512_movepi32_mask(x0));
  const __mmask32 minus = _mm512_mask_test_epi16_mask(negative, index, index);
  return _mm512_cvtepi16_epi8(_mm512_mask_add_epi16(index, minus, index, _mm512_set1_epi16(kSignBit)));
}

// Calls code_32(first 16 numbers, last 16, i) for x[i, i + 32), and writes the codes that it returns.
template <typename Fn>
inline void Encode32(const float* x, int64_t n, uint8_t* codes, Fn&& code_32) {
  int64_t i = 0;
  for (; i + kLanes16 <= n; i += kLanes16) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes + i),
                        code_32(_mm512_loadu_si512(x + i), _mm512_loadu_si512(x + i + kLanes), i));
  }
  if (i < n) {
    const __mmask32 left = (1u << (n - i)) - 1;
    const __m512i x0 = _mm512_maskz_loadu_epi32(static_cast<__mmask16>(left), x + i);
    const __m512i x1 = _mm512_maskz_loadu_epi32(static_cast<__mmask16>(left >> kLanes), x + i + kLanes);
    _mm256_mask_storeu_epi8(codes + i, left, code_32(x0, x1, i));
  }
}

template <bool kSteps>
void EncodeNearest(const float* x, int64_t n, float scale, const Codebook& book, uint8_t* codes) {
  const Search<kSteps> search(book.nearest);
  const __m512 scales = _mm512_set1_ps(scale);
  Encode32(x, n, codes, [&](__m512i x0, __m512i x1, int64_t) {
    const Quotients y(x0, x1, scales);
    return WithSigns(search.Below(y.upper, y.lower), x0, x1);
  });
}

void EncodeFloats(const float* x, int64_t n, float scale, const Codebook& book, uint8_t* codes) {
  book.nearest.steps ? EncodeNearest<true>(x, n, scale, book, codes)
                     : EncodeNearest<false>(x, n, scale, book, codes);
}

// z xor z >> kShift.
template <int kShift>
inline __m512i Folded(__m512i z) {
  return _mm512_xor_si512(z, _mm512_srli_epi64(z, kShift));
}

// Mix of eight numbers, the upper 24 bits.
inline __m256i Mixed24(__m512i z) {
  z = _mm512_mullo_epi64(Folded<30>(z), _mm512_set1_epi64(static_cast<int64_t>(kMixFactor1)));
  z = _mm512_mullo_epi64(Folded<27>(z), _mm512_set1_epi64(static_cast<int64_t>(kMixFactor2)));
  return _mm512_cvtepi64_epi32(_mm512_srli_epi64(Folded<31>(z), 40));
}

template <bool kSteps>
void EncodeRandomly(const float* x, int64_t n, float scale, const Codebook& book, Dither dither,
                    uint8_t* codes) {
  const Search<kSteps> search(book.floor);
  const Values values(book);
  const __m512 scales = _mm512_set1_ps(scale);
  const __m512i last = _mm512_set1_epi32(127);
  __m512i first_of_equals[4];
  for (int i = 0; i < 4; ++i) {
    first_of_equals[i] = _mm512_cvtepu8_epi16(
        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(book.first.data() + i * kLanes16)));
  }
  const __m512i lanes = _mm512_mullo_epi64(_mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7),
                                           _mm512_set1_epi64(static_cast<int64_t>(kGoldenRatio)));
  // Which of 16 numbers go up, the first of which lies at `place`.
  const auto up = [&](__m512i low, __m512 y, uint64_t place) {
    const auto eight = [&](uint64_t at) {
      const uint64_t z = dither.key + at * kGoldenRatio;
      return Mixed24(_mm512_add_epi64(_mm512_set1_epi64(static_cast<int64_t>(z)), lanes));
    };
    const __m512i bits = _mm512_inserti64x4(_mm512_castsi256_si512(eight(place)), eight(place + 8), 1);
    const __m512 random = _mm512_mul_ps(_mm512_cvtepi32_ps(bits), _mm512_set1_ps(0x1p-24f));
    const __m512 below = values.At(low);
    const __m512 above = values.At(_mm512_min_epi32(_mm512_add_epi32(low, _mm512_set1_epi32(1)), last));
    return _mm512_cmp_ps_mask(_mm512_mul_ps(random, _mm512_sub_ps(above, below)), _mm512_sub_ps(y, below),
                              _CMP_LT_OQ);
  };
  Encode32(x, n, codes, [&](__m512i x0, __m512i x1, int64_t i) {
    const Quotients y(x0, x1, scales);
    const __m512i low = search.Below(y.upper, y.lower);  // the last of equal ones
    const uint64_t place = static_cast<uint64_t>(dither.place + i);
    const __mmask32 ups = _mm512_kunpackw(
        up(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(low, 1)), y.second, place + kLanes),
        up(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(low)), y.first, place));
    __m512i index = low;
    if (kSteps) {
      const __mmask32 late = _mm512_test_epi16_mask(low, _mm512_set1_epi16(64));
      index = _mm512_mask_blend_epi16(late,
                                      _mm512_permutex2var_epi16(first_of_equals[0], low, first_of_equals[1]),
                                      _mm512_permutex2var_epi16(first_of_equals[2], low, first_of_equals[3]));
    }
    return WithSigns(_mm512_mask_add_epi16(index, ups, low, _mm512_set1_epi16(1)), x0, x1);
  });
}

void EncodeStochastic(const float* x, int64_t n, float scale, const Codebook& book, Dither dither,
                      uint8_t* codes) {
  book.floor.steps ? EncodeRandomly<true>(x, n, scale, book, dither, codes)
                   : EncodeRandomly<false>(x, n, scale, book, dither, codes);
}

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
