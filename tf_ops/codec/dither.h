// Stochastic rounding: random numbers that are a function of a seed and of an element's place, and what they
// decide. docs/wire-format.md describes both; hvd8bit/reference.py is the same in Python.
#ifndef HVD8BIT_CODEC_DITHER_H_
#define HVD8BIT_CODEC_DITHER_H_

#include <cstdint>

#include "tf_ops/codec/format.h"

namespace hvd8bit {

// Where a block's random numbers come from: the key made of a seed, and the first element's place in the row.
struct Dither {
  uint64_t key;
  int64_t place;
};

inline constexpr uint64_t kGoldenRatio = 0x9E3779B97F4A7C15ull;
inline constexpr uint64_t kMixFactor1 = 0xBF58476D1CE4E5B9ull;
inline constexpr uint64_t kMixFactor2 = 0x94D049BB133111EBull;

// The finaliser of SplitMix64: every bit of the result depends on every bit of `z`.
HVD8BIT_HOST_DEVICE inline uint64_t Mix(uint64_t z) {
  z = (z ^ (z >> 30)) * kMixFactor1;
  z = (z ^ (z >> 27)) * kMixFactor2;
  return z ^ (z >> 31);
}

// Seeds that are neighbours must not give shifted copies of one sequence.
HVD8BIT_HOST_DEVICE inline uint64_t DitherKey(int64_t seed) {
  return Mix(static_cast<uint64_t>(seed) + kGoldenRatio);
}

// A number in [0, 1), a multiple of 2^-24.
HVD8BIT_HOST_DEVICE inline float RandomAt(uint64_t key, int64_t place) {
  return static_cast<float>(Mix(key + static_cast<uint64_t>(place) * kGoldenRatio) >> 40) * 0x1p-24f;
}

// Whether y, of [low, high), becomes `high`: with the probability by which the mean is y.
HVD8BIT_HOST_DEVICE inline bool RoundsUp(float low, float high, float y, float random) {
  return random * (high - low) < y - low;
}

// The index that y gets: of the magnitude below or above it, of the latter with the probability by which the
// mean is y. `nearest` is the index of the nearest magnitude, the first of equal ones; y in [0, 1].
HVD8BIT_HOST_DEVICE inline int StochasticIndex(const float* magnitudes, int nearest, float y, float random) {
  const float at = magnitudes[nearest];
  if (y == at) {
    return nearest;
  }
  int low = nearest, high = nearest;
  if (y > at) {
    do {
      ++high;
    } while (magnitudes[high] == at);
  } else {
    --low;
    while (low > 0 && magnitudes[low - 1] == magnitudes[low]) {
      --low;
    }
  }
  return RoundsUp(magnitudes[low], magnitudes[high], y, random) ? high : low;
}

}  // namespace hvd8bit

#endif  // HVD8BIT_CODEC_DITHER_H_
