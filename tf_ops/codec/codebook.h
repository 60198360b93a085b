// A data type's magnitudes and the table that finds the nearest one.
#ifndef HVD8BIT_CODEC_CODEBOOK_H_
#define HVD8BIT_CODEC_CODEBOOK_H_

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "tf_ops/codec/format.h"

namespace hvd8bit {

// The 127 thresholds between indices, cut in two halves of 16 bits, for back ends that take 32 numbers at a
// time. Of those below y the ones with a smaller upper half are counted by a search tree of seven levels: y
// is above node j's half or not, and goes to node 2j + 1 or 2j of the next level. Those with the same upper
// half are equal: one comparison of the lower halves decides, and `step` tells how many they are.
struct SplitThresholds {
  using Halves = std::array<uint16_t, 128>;
  alignas(64) Halves tree;                // upper halves, level by level
  alignas(64) Halves upper, lower, step;  // ascending
  bool steps;                             // whether a step is above 1
};

// Rounding rule: y in [0, 1] gets the index of the nearest magnitude; in the middle between two the smaller
// one; of equal magnitudes the first.
//
// The table has one bucket for each (exponent, 6 bits of mantissa) of y. No bucket holds more than one
// threshold, so that one integer comparison decides. 6 bits, since `linear` puts thresholds 1/127 apart in
// [0.5, 1).
struct Codebook {
  struct Bucket {
    uint32_t threshold;  // bits of the largest float32 that still belongs below
    uint8_t below;       // the index below the threshold
    uint8_t step;  // what to add above it: an addition, since a branch would be mispredicted half the time
    uint16_t unused;
  };
  static constexpr int kBucketShift = 23 - 6;

  std::array<float, 128> magnitudes;
  std::array<float, 256> values;  // by code, with the sign; 0x80 reads as 0
  // Bits of the thresholds between neighbouring indices, ascending. Equal magnitudes share the threshold
  // above them, so that the number of thresholds below y is its index.
  std::array<uint32_t, 127> thresholds;
  SplitThresholds nearest;  // the same
  // Stochastic rounding: of the magnitudes above the first one, so that the number is that of the last
  // magnitude that is not above y.
  SplitThresholds floor;
  std::array<uint8_t, 128> first;  // of the magnitudes that are equal to this one
  // The magnitudes around y: [1] where it is smaller than the nearest one, whose index goes in; [0]
  // elsewhere.
  std::array<uint8_t, 128> around_low[2], around_high[2];
  uint32_t first_bucket;  // of everything smaller too
  std::vector<Bucket> buckets;

  // `bits` of a float32 in [0, 1].
  uint8_t Index(uint32_t bits) const {
    uint32_t at = bits >> kBucketShift;
    at = at < first_bucket ? 0 : at - first_bucket;
    const Bucket& bucket = buckets[at];
    return bucket.below + (-static_cast<uint8_t>(bits > bucket.threshold) & bucket.step);
  }
};

// `data_type` from 1 to NumberOfDataTypes().
const Codebook& GetCodebook(int data_type);
int NumberOfDataTypes();
// 0 where there is no such data type.
int DataTypeByName(const std::string& name);
std::string DataTypeName(int data_type);
std::string AllDataTypeNames();

}  // namespace hvd8bit

#endif  // HVD8BIT_CODEC_CODEBOOK_H_
