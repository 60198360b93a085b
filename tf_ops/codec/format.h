// The wire format: chunk header, hashes, and the settings they cover. docs/wire-format.md describes it;
// hvd8bit/wire.py is the same in Python.
#ifndef HVD8BIT_CODEC_FORMAT_H_
#define HVD8BIT_CODEC_FORMAT_H_

#include <cstdint>
#include <cstring>

// For what CUDA kernels call, too.
#if defined(__CUDACC__)
#define HVD8BIT_HOST_DEVICE __host__ __device__
#else
#define HVD8BIT_HOST_DEVICE
#endif

namespace hvd8bit {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the wire is little-endian");

inline constexpr char kMagic[4] = {'H', '8', 'B', 'T'};
inline constexpr uint16_t kFormatVersion = 1;
inline constexpr int64_t kHeaderBytes = 64;
inline constexpr int64_t kScaleBytes = 4;
inline constexpr int64_t kAlignment = 64;  // elements on which tensors and chunks start
inline constexpr int64_t kMinBlockSize = 64;
inline constexpr int64_t kMaxBlockSize = 65536;
inline constexpr uint8_t kSignBit = 0x80;

// What the elements of a tensor are; the numbers go into the layout's hash.
enum class DType : uint8_t { kFloat32 = 1, kFloat64 = 2, kFloat16 = 3, kBFloat16 = 4 };

enum class Rounding : uint8_t { kNearest = 0, kStochastic = 1 };

// The settings that all workers share.
struct Spec {
  uint8_t data_type = 0;    // 1 + position in kDataTypeNames
  int64_t block_size = 0;   // 0: one block for a tensor's whole part of a chunk
  float fixed_scale = 0.f;  // 0: a block is scaled by its own absolute maximum
  Rounding rounding = Rounding::kNearest;
};

struct ChunkHeader {
  char magic[4];
  uint16_t version;
  uint8_t data_type;
  uint8_t rounding;
  uint32_t block_size;
  uint32_t shards;
  uint32_t shard;
  uint16_t slice;
  uint16_t slices;
  uint64_t elements;  // of the whole list of tensors
  uint32_t tensors;
  uint32_t blocks;      // in this chunk
  uint64_t code_bytes;  // in this chunk, before alignment
  uint64_t layout_hash;
  uint64_t settings_hash;
};
static_assert(sizeof(ChunkHeader) == kHeaderBytes, "no padding");

// FNV-1a over unsigned 64-bit little-endian words.
class Fnv1a {
 public:
  void Add(uint64_t word) {
    for (int shift = 0; shift < 64; shift += 8) {
      value_ = (value_ ^ ((word >> shift) & 0xff)) * 0x100000001B3ull;
    }
  }
  uint64_t value() const { return value_; }

 private:
  uint64_t value_ = 0xCBF29CE484222325ull;
};

HVD8BIT_HOST_DEVICE inline uint32_t FloatBits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

HVD8BIT_HOST_DEVICE inline float BitsToFloat(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint64_t SettingsHash(const Spec& spec) {
  Fnv1a hash;
  hash.Add(spec.data_type);
  hash.Add(static_cast<uint64_t>(spec.block_size));
  hash.Add(FloatBits(spec.fixed_scale));
  hash.Add(static_cast<uint64_t>(spec.rounding));
  return hash.value();
}

}  // namespace hvd8bit

#endif  // HVD8BIT_CODEC_FORMAT_H_
