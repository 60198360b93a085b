#include "tf_ops/codec/codebook.h"

#include <cstdio>
#include <cstdlib>
#include <utility>

namespace hvd8bit {
namespace {

#include "codebooks.inc"

// A constant of the build is wrong: any test that loads the library finds it.
[[noreturn]] void Refuse(const char* what) {
  std::fprintf(stderr, "hvd8bit: %s; the back ends cannot search this data type\n", what);
  std::abort();
}

// Largest float32 not above the exact middle between two magnitudes.
float Threshold(float low, float high) {
  const double middle = (static_cast<double>(low) + static_cast<double>(high)) / 2;
  float rounded = static_cast<float>(middle);
  if (static_cast<double>(rounded) > middle) {
    rounded = BitsToFloat(FloatBits(rounded) - 1);
  }
  return rounded;
}

// `thresholds` in ascending order.
SplitThresholds Split(const std::array<uint32_t, 127>& thresholds) {
  SplitThresholds split;
  split.tree.fill(0);
  split.steps = false;
  for (int level = 0, node = 0; level < 7; ++level) {
    for (int j = 0; j < 1 << level; ++j, ++node) {
      split.tree[node] = static_cast<uint16_t>(thresholds[((2 * j + 1) << (6 - level)) - 1] >> 16);
    }
  }
  for (int i = 0; i < 128; ++i) {
    const uint32_t threshold = i < 127 ? thresholds[i] : 0xffffffffu;  // nothing is above the last one
    split.upper[i] = static_cast<uint16_t>(threshold >> 16);
    split.lower[i] = static_cast<uint16_t>(threshold & 0xffff);
    split.step[i] = 1;
    for (int next = i + 1; next < 127 && thresholds[next] >> 16 == threshold >> 16; ++next) {
      if (thresholds[next] != threshold) {
        Refuse("two thresholds with the same upper half");
      }
      ++split.step[i];
      split.steps = true;
    }
  }
  return split;
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
  std::array<uint32_t, 127> just_below;  // magnitude i + 1
  for (int i = 126; i >= 0; --i) {       // [i]: between i and i + 1
    book.thresholds[i] = magnitudes[i] == magnitudes[i + 1]
                             ? book.thresholds[i + 1]
                             : FloatBits(Threshold(magnitudes[i], magnitudes[i + 1]));
    just_below[i] = FloatBits(magnitudes[i + 1]) - 1;
  }
  book.nearest = Split(book.thresholds);
  book.floor = Split(just_below);
  for (int i = 0; i < 128; ++i) {
    const bool same = i > 0 && magnitudes[i] == magnitudes[i - 1];
    book.first[i] = same ? book.first[i - 1] : static_cast<uint8_t>(i);
    book.around_low[0][i] = book.around_high[1][i] = static_cast<uint8_t>(i);
    book.around_low[1][i] = book.first[i] == 0 ? 0 : book.first[book.first[i] - 1];
  }
  for (int i = 127; i >= 0; --i) {
    const bool same = i < 127 && magnitudes[i] == magnitudes[i + 1];
    book.around_high[0][i] = i == 127 ? 127 : same ? book.around_high[0][i + 1] : static_cast<uint8_t>(i + 1);
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
      Refuse("two thresholds in one bucket");
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
