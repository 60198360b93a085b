// The dtypes of tensors as C++ types: conversion to and from float32, exact or rounded to nearest even.
#ifndef HVD8BIT_CODEC_FLOAT_TYPES_H_
#define HVD8BIT_CODEC_FLOAT_TYPES_H_

#include <cstdint>

#include "tf_ops/codec/format.h"

namespace hvd8bit {

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

HVD8BIT_HOST_DEVICE inline float ToFloat(float x) { return x; }
HVD8BIT_HOST_DEVICE inline float ToFloat(double x) { return static_cast<float>(x); }
HVD8BIT_HOST_DEVICE inline float ToFloat(BFloat16 x) {
  return BitsToFloat(static_cast<uint32_t>(x.bits) << 16);
}

HVD8BIT_HOST_DEVICE inline float ToFloat(Half x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(x.bits & 0x7fffu) << 13;
  if (magnitude >= 0x0f800000u) {  // Inf and NaN
    return BitsToFloat(sign | magnitude | 0x7f800000u);
  }
  // The exponent's bias differs by 112; a multiplication moves it and normalises subnormals, exactly.
  return BitsToFloat(sign | FloatBits(BitsToFloat(magnitude) * 0x1p112f));
}

template <typename T>
HVD8BIT_HOST_DEVICE T FromFloat(float x);

template <>
HVD8BIT_HOST_DEVICE inline float FromFloat<float>(float x) {
  return x;
}

template <>
HVD8BIT_HOST_DEVICE inline double FromFloat<double>(float x) {
  return x;
}

template <>
HVD8BIT_HOST_DEVICE inline BFloat16 FromFloat<BFloat16>(float x) {
  const uint32_t bits = FloatBits(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {  // NaN: keep it one
    return {static_cast<uint16_t>((bits >> 16) | 0x40u)};
  }
  return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

template <>
HVD8BIT_HOST_DEVICE inline Half FromFloat<Half>(float x) {
  const uint32_t bits = FloatBits(x);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t half;
  if (magnitude > 0x7f800000u) {  // NaN
    half = 0x7e00u;
  } else if (magnitude >= 0x477ff000u) {  // rounds to 65520 or more: Inf
    half = 0x7c00u;
  } else if (magnitude < 0x38800000u) {  // below 2^-14: subnormal; adding 0.5 rounds at its last place
    half = FloatBits(BitsToFloat(magnitude) + 0.5f) - FloatBits(0.5f);
  } else {
    half = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  }
  return {static_cast<uint16_t>(sign | half)};
}

// Calls `fn` with a null pointer of the type that `dtype` stands for.
template <typename Fn>
void ForDType(DType dtype, Fn&& fn) {
  switch (dtype) {
    case DType::kFloat32:
      return fn(static_cast<float*>(nullptr));
    case DType::kFloat64:
      return fn(static_cast<double*>(nullptr));
    case DType::kFloat16:
      return fn(static_cast<Half*>(nullptr));
    case DType::kBFloat16:
      return fn(static_cast<BFloat16*>(nullptr));
  }
}

inline int64_t DTypeBytes(DType dtype) {
  int64_t bytes = 0;
  ForDType(dtype, [&](auto* type) { bytes = sizeof(*type); });
  return bytes;
}

}  // namespace hvd8bit

#endif  // HVD8BIT_CODEC_FLOAT_TYPES_H_
