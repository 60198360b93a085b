#include "tf_ops/codec/codebook.h"

#include <cstdio>
#include <cstdlib>
#include <utility>

namespace hvd8bit {
namespace {

#include "codebooks.inc"

// Largest float32 not above the exact middle between two magnitudes.
float Threshold(float low, float high) {
  const double middle = (static_cast<double>(low) + static_cast<double>(high)) / 2;
  float rounded = static_cast<float>(middle);
  if (static_cast<double>(rounded) > middle) {
    rounded = BitsToFloat(FloatBits(rounded) - 1);
  }
  return rounded;
}

Codebook MakeCodebook(const float (&magnitudes)[128]) {
  Codebook book;
  std::vector<std::pair<uint32_t, uint8_t>> steps;  // threshold, index above it
  uint8_t index = 0;
  for (int i = 0; i < 128; ++i) {
    book.magnitudes[i] = magnitudes[i];
    book.values[i] = magnitudes[i];
    book.values[i | kSignBit] = i == 0 ? 0.f : -magnitudes[i];
    if (magnitudes[i] != magnitudes[index]) {
      steps.emplace_back(FloatBits(Threshold(magnitudes[index], magnitudes[i])), static_cast<uint8_t>(i));
      index = static_cast<uint8_t>(i);
    }
  }
  std::array<float, 127> thresholds;  // [i]: between i and i + 1
  for (int i = 126; i >= 0; --i) {
    thresholds[i] =
        magnitudes[i] == magnitudes[i + 1] ? thresholds[i + 1] : Threshold(magnitudes[i], magnitudes[i + 1]);
  }
  for (int level = 0, node = 0; level < 7; ++level) {
    for (int j = 0; j < 1 << level; ++j, ++node) {
      book.tree[node] = thresholds[((2 * j + 1) << (6 - level)) - 1];
    }
  }
  book.first_bucket = steps.front().first >> Codebook::kBucketShift;
  const uint32_t last_bucket = FloatBits(1.f) >> Codebook::kBucketShift;
  size_t step = 0;
  index = 0;
  for (uint32_t bucket = book.first_bucket; bucket <= last_bucket; ++bucket) {
    Codebook::Bucket entry{0xffffffffu, index, 0, 0};
    if (step < steps.size() && steps[step].first >> Codebook::kBucketShift == bucket) {
      entry.threshold = steps[step].first;
      entry.step = steps[step].second - index;
      index = steps[step].second;
      ++step;
    }
    book.buckets.push_back(entry);
    if (step < steps.size() && steps[step].first >> Codebook::kBucketShift == bucket) {
      std::fprintf(stderr,
                   "hvd8bit: two thresholds in one bucket; kBucketShift does not fit this data type\n");
      std::abort();  // a constant of the build, found by any test that loads the library
    }
  }
  return book;
}

const std::vector<Codebook>& AllCodebooks() {
  static const auto* books = [] {
    auto* all = new std::vector<Codebook>;
    for (const auto& magnitudes : kMagnitudes) {
      all->push_back(MakeCodebook(magnitudes));
    }
    return all;
  }();
  return *books;
}

}  // namespace

const Codebook& GetCodebook(int data_type) { return AllCodebooks()[data_type - 1]; }

int NumberOfDataTypes() { return kDataTypes; }

int DataTypeByName(const std::string& name) {
  for (int i = 0; i < kDataTypes; ++i) {
    if (name == kDataTypeNames[i]) {
      return i + 1;
    }
  }
  return 0;
}

std::string DataTypeName(int data_type) {
  return data_type >= 1 && data_type <= kDataTypes ? kDataTypeNames[data_type - 1]
                                                   : "unknown data type " + std::to_string(data_type);
}

std::string AllDataTypeNames() {
  std::string all;
  for (const char* name : kDataTypeNames) {
    all += (all.empty() ? "" : ", ") + std::string(name);
  }
  return all;
}

}  // namespace hvd8bit
