#include "tf_ops/codec/payload.h"

#include <algorithm>
#include <cstring>
#include <iterator>

#include "tf_ops/codec/codebook.h"
#include "tf_ops/codec/cpu/float_environment.h"

namespace hvd8bit {
namespace {

float ReadScale(const uint8_t* scales, int64_t block) {
  float scale;
  std::memcpy(&scale, scales + block * kScaleBytes, sizeof scale);
  return scale;
}

void WriteScale(uint8_t* scales, int64_t block, float scale) {
  std::memcpy(scales + block * kScaleBytes, &scale, sizeof scale);
}

// What decides how a block is rounded; null where each number goes to the nearest value.
class BlockDither {
 public:
  BlockDither(const Plan& plan, const Piece& piece, int64_t block)
      : stochastic_(plan.spec.rounding == Rounding::kStochastic),
        dither_{DitherKey(plan.seed), piece.row + block * piece.block_size} {}
  const Dither* get() const { return stochastic_ ? &dither_ : nullptr; }

 private:
  bool stochastic_;
  Dither dither_;
};

// The pieces of several chunks that lie one after another, as one row of blocks for the threads to share.
class BlockRow {
 public:
  explicit BlockRow(const std::vector<Layout::Chunk>& chunks) {
    int64_t offset = 0;
    for (const Layout::Chunk& chunk : chunks) {
      for (const Piece& piece : chunk.pieces) {
        rows_.push_back({blocks_, offset, offset + chunk.ScalesOffset(), &piece});
        blocks_ += piece.blocks;
        elements_ += piece.stop - piece.start;
      }
      offset += chunk.Bytes();
    }
  }

  // Calls fn(piece, block of the piece, offset of its codes, offset of its chunk's scales) for each block,
  // with the whole range of floats at work; what it streams past the caches is seen by all afterwards. `cost`
  // is in cycles per element.
  template <typename Fn>
  void ForEach(const ParallelFor& parallel_for, int64_t cost, Fn fn) const {
    if (blocks_ == 0) {
      return;
    }
    parallel_for(blocks_, cost * (elements_ / blocks_ + 1), [&](int64_t begin, int64_t end) {
      FullFloatRange full_float_range;
      auto row = std::upper_bound(rows_.begin(), rows_.end(), begin,
                                  [](int64_t block, const Row& r) { return block < r.first_block; }) -
                 1;
      for (int64_t at = begin; at < end; ++row) {
        const int64_t stop = std::min(end, row->first_block + row->piece->blocks);
        for (; at < stop; ++at) {
          const Piece& piece = *row->piece;
          const int64_t block = at - row->first_block;
          fn(piece, block, row->chunk + kHeaderBytes + piece.codes_offset + block * piece.block_size,
             row->scales);
        }
      }
      FinishStreaming();
    });
  }

 private:
  struct Row {
    int64_t first_block;
    int64_t chunk, scales;  // offsets in the payload
    const Piece* piece;
  };
  std::vector<Row> rows_;
  int64_t blocks_ = 0, elements_ = 0;
};

// Where each tensor's elements begin when they lie one after another.
std::vector<int64_t> Starts(const std::vector<TensorInfo>& tensors) {
  std::vector<int64_t> starts;
  int64_t elements = 0;
  for (const TensorInfo& tensor : tensors) {
    starts.push_back(elements);
    elements += tensor.elements;
  }
  return starts;
}

// Header, and zeros where no code and no scale will be written: between tensors, and before the scales.
void PrepareChunk(const Plan& plan, const Layout::Chunk& chunk, int64_t shard, int64_t slice, uint8_t* out) {
  const ChunkHeader header = MakeHeader(plan, chunk, shard, slice);
  std::memcpy(out, &header, sizeof header);

  int64_t written = 0;
  for (const Piece& piece : chunk.pieces) {
    std::memset(out + kHeaderBytes + written, 0, piece.codes_offset - written);
    written = piece.codes_offset + piece.stop - piece.start;
  }
  std::memset(out + kHeaderBytes + written, 0, chunk.ScalesOffset() - kHeaderBytes - written);
}

std::string DescribeSettings(const ChunkHeader& header) {
  return "data_type=" + DataTypeName(header.data_type) +
         ", block_size=" + (header.block_size ? std::to_string(header.block_size) : "None") +
         (header.rounding == static_cast<uint8_t>(Rounding::kStochastic) ? ", rounding=stochastic" : "");
}

std::string DescribeTensors(const std::vector<TensorInfo>& tensors) {
  static constexpr const char* kNames[] = {"?", "float32", "float64", "float16", "bfloat16"};
  constexpr size_t kShown = 4;
  std::string text;
  for (size_t i = 0; i < tensors.size() && i < kShown; ++i) {
    text += (i ? ", " : "") + std::string(kNames[static_cast<int>(tensors[i].dtype)]) + "[";
    for (size_t d = 0; d < tensors[i].shape.size(); ++d) {
      text += (d ? "," : "") + std::to_string(tensors[i].shape[d]);
    }
    text += "]";
  }
  return tensors.size() > kShown ? text + ", ..." : text;
}

std::string WrongSize(const std::string& sender, int64_t bytes, int64_t expected) {
  return "the chunk from " + sender + " is truncated or oversized: " + std::to_string(bytes) +
         " bytes where " + std::to_string(expected) + " were expected";
}

std::string CheckHeader(const Plan& plan, const Layout::Chunk& chunk, int64_t shard, int64_t slice,
                        const uint8_t* data, int64_t bytes, const std::string& sender) {
  if (bytes < kHeaderBytes) {
    return "the chunk from " + sender + " is truncated: " + std::to_string(bytes) +
           " bytes, a header alone has " + std::to_string(kHeaderBytes);
  }
  ChunkHeader header;
  std::memcpy(&header, data, sizeof header);
  const ChunkHeader expected = MakeHeader(plan, chunk, shard, slice);
  const std::string error = CompareHeaders(expected, header, sender, &plan.tensors);
  return error.empty() && bytes != chunk.Bytes() ? WrongSize(sender, bytes, chunk.Bytes()) : error;
}

}  // namespace

ChunkHeader MakeHeader(const Plan& plan, const Layout::Chunk& chunk, int64_t shard, int64_t slice) {
  ChunkHeader header{};
  std::memcpy(header.magic, kMagic, sizeof header.magic);
  header.version = kFormatVersion;
  header.data_type = plan.spec.data_type;
  header.rounding = static_cast<uint8_t>(plan.spec.rounding);
  header.block_size = static_cast<uint32_t>(plan.spec.block_size);
  header.shards = static_cast<uint32_t>(plan.layout.shards());
  header.shard = static_cast<uint32_t>(shard);
  header.slice = static_cast<uint16_t>(slice);
  header.slices = static_cast<uint16_t>(plan.layout.slices());
  header.elements = static_cast<uint64_t>(plan.layout.elements());
  header.tensors = static_cast<uint32_t>(plan.layout.tensors());
  header.blocks = static_cast<uint32_t>(chunk.blocks);
  header.code_bytes = static_cast<uint64_t>(chunk.code_bytes);
  header.layout_hash = plan.layout.hash();
  header.settings_hash = SettingsHash(plan.spec);
  return header;
}

std::string CompareHeaders(const ChunkHeader& expected, const ChunkHeader& received,
                           const std::string& sender, const std::vector<TensorInfo>* own) {
  const auto wrong = [&](const std::string& what) { return "the chunk from " + sender + " " + what; };
  if (std::memcmp(received.magic, expected.magic, sizeof kMagic) != 0) {
    return wrong("is no hvd8bit chunk: its first four bytes are not 'H8BT'");
  }
  if (received.version != expected.version) {
    return wrong("has format version " + std::to_string(received.version) + ", this worker reads version " +
                 std::to_string(expected.version) + "; install the same hvd8bit on all workers");
  }
  if (received.data_type != expected.data_type || received.block_size != expected.block_size ||
      received.rounding != expected.rounding || received.settings_hash != expected.settings_hash) {
    return wrong("was encoded with other settings: " + DescribeSettings(received) + ", this worker uses " +
                 DescribeSettings(expected) +
                 "; settings (data_type, block_size, scaling, rounding) must be the same on all workers");
  }
  if (received.shards != expected.shards) {
    return wrong("was cut for " + std::to_string(received.shards) + " workers, this worker counts " +
                 std::to_string(expected.shards));
  }
  if (received.layout_hash != expected.layout_hash || received.elements != expected.elements ||
      received.tensors != expected.tensors || received.slices != expected.slices) {
    return wrong("holds other tensors: " + std::to_string(received.elements) + " elements in " +
                 std::to_string(received.tensors) + " tensor(s), this worker has " +
                 std::to_string(expected.elements) + " elements in " + std::to_string(expected.tensors) +
                 (own != nullptr ? ": " + DescribeTensors(*own) : "") +
                 "; number, order, shapes and dtypes of the tensors must be the same on all workers");
  }
  if (received.shard != expected.shard || received.slice != expected.slice) {
    return wrong("is part " + std::to_string(received.slice) + " of shard " + std::to_string(received.shard) +
                 " where part " + std::to_string(expected.slice) + " of shard " +
                 std::to_string(expected.shard) + " was expected");
  }
  if (received.blocks != expected.blocks || received.code_bytes != expected.code_bytes) {
    return wrong("is truncated or oversized: " + std::to_string(received.code_bytes) + " codes in " +
                 std::to_string(received.blocks) + " block(s) where " + std::to_string(expected.code_bytes) +
                 " in " + std::to_string(expected.blocks) + " were expected");
  }
  return "";
}

std::string CheckSpec(const Spec& spec) {
  if (spec.data_type < 1 || spec.data_type > NumberOfDataTypes()) {
    return "data_type must be one of " + AllDataTypeNames();
  }
  if (spec.block_size != 0 && (spec.block_size < kMinBlockSize || spec.block_size > kMaxBlockSize ||
                               spec.block_size % kAlignment != 0)) {
    return "block_size must be a multiple of " + std::to_string(kAlignment) + " in [" +
           std::to_string(kMinBlockSize) + ", " + std::to_string(kMaxBlockSize) +
           "], or 0 for one block, got " + std::to_string(spec.block_size);
  }
  if (!(spec.fixed_scale >= 0.f && spec.fixed_scale <= 3.4028234e38f)) {
    return "fixed_scale must be finite and not negative, got " + std::to_string(spec.fixed_scale);
  }
  return "";
}

std::vector<Layout::Chunk> SliceOfAllChunks(const Layout& layout, int64_t slice) {
  std::vector<Layout::Chunk> chunks;
  for (int64_t shard = 0; shard < layout.shards(); ++shard) {
    chunks.push_back(layout.GetChunk(shard, slice));
  }
  return chunks;
}

void EncodeList(const Plan& plan, const std::vector<Layout::Chunk>& chunks, int64_t slice,
                const std::vector<const void*>& data, uint8_t* payload, const ParallelFor& parallel_for) {
  int64_t offset = 0;
  for (size_t shard = 0; shard < chunks.size(); ++shard) {
    PrepareChunk(plan, chunks[shard], static_cast<int64_t>(shard), slice, payload + offset);
    offset += chunks[shard].Bytes();
  }
  const Codebook& book = GetCodebook(plan.spec.data_type);
  BlockRow(chunks).ForEach(
      parallel_for, 8, [&](const Piece& piece, int64_t block, int64_t codes, int64_t scales) {
        const int64_t start = piece.BlockStart(block);
        float scale;
        plan.backend->encode(plan.tensors[piece.tensor].dtype, data[piece.tensor], start,
                             piece.BlockStop(block) - start, book, plan.spec.fixed_scale,
                             BlockDither(plan, piece, block).get(), payload + codes, &scale);
        WriteScale(payload + scales, piece.first_block + block, scale);
      });
}

std::string CheckShardSizes(const Plan& plan, const Layout::Chunk& chunk, int64_t bytes,
                            const std::vector<int64_t>& sent) {
  if (static_cast<int64_t>(sent.size()) != plan.layout.shards()) {
    return "chunks of " + std::to_string(sent.size()) + " workers were received where " +
           std::to_string(plan.layout.shards()) + " were expected";
  }
  for (size_t worker = 0; worker < sent.size(); ++worker) {
    if (sent[worker] != chunk.Bytes()) {
      return WrongSize("worker " + std::to_string(worker), sent[worker], chunk.Bytes()) +
             "; settings, and number, order, shapes and dtypes of the tensors, must be the same on all "
             "workers";
    }
  }
  const int64_t expected = plan.layout.shards() * chunk.Bytes();
  return bytes == expected ? ""
                           : "the payload is truncated or oversized: " + std::to_string(bytes) +
                                 " bytes where " + std::to_string(expected) + " were expected";
}

std::string CheckShards(const Plan& plan, const Layout::Chunk& chunk, int64_t shard, int64_t slice,
                        const uint8_t* payload, int64_t bytes, const std::vector<int64_t>& sent) {
  if (static_cast<int64_t>(sent.size()) != plan.layout.shards()) {
    return "chunks of " + std::to_string(sent.size()) + " workers were received where " +
           std::to_string(plan.layout.shards()) + " were expected";
  }
  int64_t offset = 0;
  for (size_t worker = 0; worker < sent.size(); ++worker) {
    if (sent[worker] < 0 || sent[worker] > bytes - offset) {
      return "the payload is truncated: " + std::to_string(bytes) + " bytes, and worker " +
             std::to_string(worker) + "'s chunk would end at " + std::to_string(offset + sent[worker]);
    }
    const std::string error = CheckHeader(plan, chunk, shard, slice, payload + offset, sent[worker],
                                          "worker " + std::to_string(worker));
    if (!error.empty()) {
      return error;
    }
    offset += sent[worker];
  }
  return offset == bytes ? ""
                         : "the payload is oversized: " + std::to_string(bytes) + " bytes where " +
                               std::to_string(offset) + " were expected";
}

void ReduceShards(const Plan& plan, const Layout::Chunk& chunk, int64_t shard, int64_t slice,
                  const uint8_t* payload, uint8_t* out, const ParallelFor& parallel_for) {
  PrepareChunk(plan, chunk, shard, slice, out);
  const Codebook& book = GetCodebook(plan.spec.data_type);
  const int64_t shards = plan.layout.shards();
  // The mean is what a fixed scale was chosen for; the sum is up to `shards` times as large.
  const float fixed_scale = plan.spec.fixed_scale * static_cast<float>(shards);
  BlockRow({chunk}).ForEach(
      parallel_for, 4 * (shards + 2), [&](const Piece& piece, int64_t block, int64_t codes, int64_t scales) {
        thread_local std::vector<const uint8_t*> from;
        thread_local std::vector<float> from_scales;
        from.resize(shards);
        from_scales.resize(shards);
        for (int64_t worker = 0; worker < shards; ++worker) {
          const uint8_t* sent = payload + worker * chunk.Bytes();
          from[worker] = sent + codes;
          from_scales[worker] = ReadScale(sent + scales, piece.first_block + block);
        }
        float scale;
        plan.backend->sum_and_encode(from.data(), from_scales.data(), shards,
                                     piece.BlockStop(block) - piece.BlockStart(block), book, fixed_scale,
                                     BlockDither(plan, piece, block).get(), out + codes, &scale);
        WriteScale(out + scales, piece.first_block + block, scale);
      });
}

Elements ElementsOf(const Plan& plan, const Layout::Chunk& chunk) {
  if (chunk.pieces.empty()) {
    return {0, 0};
  }
  const Piece &front = chunk.pieces.front(), &back = chunk.pieces.back();
  const std::vector<int64_t> starts = Starts(plan.tensors);
  const int64_t first = starts[front.tensor] + front.start;
  return {first, starts[back.tensor] + back.stop - first};
}

void SumShards(const Plan& plan, const Layout::Chunk& chunk, const uint8_t* payload, float* out,
               const ParallelFor& parallel_for) {
  const Codebook& book = GetCodebook(plan.spec.data_type);
  const int64_t shards = plan.layout.shards(), first = ElementsOf(plan, chunk).first;
  const std::vector<int64_t> starts = Starts(plan.tensors);
  BlockRow({chunk}).ForEach(parallel_for, 4 * shards,
                            [&](const Piece& piece, int64_t block, int64_t codes, int64_t scales) {
                              const int64_t n = piece.BlockStop(block) - piece.BlockStart(block);
                              float* sum = out + starts[piece.tensor] + piece.BlockStart(block) - first;
                              for (int64_t worker = 0; worker < shards; ++worker) {
                                const uint8_t* sent = payload + worker * chunk.Bytes();
                                const float scale = ReadScale(sent + scales, piece.first_block + block);
                                float decoded[1024];
                                for (int64_t at = 0; at < n; at += std::size(decoded)) {
                                  const int64_t count = std::min<int64_t>(n - at, std::size(decoded));
                                  plan.backend->decode(DType::kFloat32, sent + codes + at, scale, count, book,
                                                       worker == 0 ? sum + at : decoded, 0, /*stream=*/false);
                                  for (int64_t i = 0; worker > 0 && i < count; ++i) {
                                    sum[at + i] += decoded[i];
                                  }
                                }
                              }
                            });
}

std::string CheckReduced(const Plan& plan, const std::vector<Layout::Chunk>& chunks, int64_t slice,
                         const uint8_t* payload, int64_t bytes) {
  int64_t offset = 0;
  for (size_t shard = 0; shard < chunks.size(); ++shard) {
    const int64_t left = bytes - offset;
    const std::string error =
        CheckHeader(plan, chunks[shard], static_cast<int64_t>(shard), slice, payload + offset,
                    std::min(left, chunks[shard].Bytes()), "worker " + std::to_string(shard));
    if (!error.empty()) {
      return error;
    }
    offset += chunks[shard].Bytes();
  }
  return offset == bytes ? ""
                         : "the payload is oversized: " + std::to_string(bytes) + " bytes where " +
                               std::to_string(offset) + " were expected";
}

std::string CheckReducedSize(const std::vector<Layout::Chunk>& chunks, int64_t bytes) {
  int64_t expected = 0;
  for (const Layout::Chunk& chunk : chunks) {
    expected += chunk.Bytes();
  }
  return bytes == expected ? ""
                           : "the payload is truncated or oversized: " + std::to_string(bytes) +
                                 " bytes where " + std::to_string(expected) + " were expected";
}

void DecodeList(const Plan& plan, const std::vector<Layout::Chunk>& chunks, const uint8_t* payload,
                double factor, const std::vector<void*>& out, const ParallelFor& parallel_for) {
  const Codebook& book = GetCodebook(plan.spec.data_type);
  const double shards = static_cast<double>(plan.layout.shards());
  constexpr int64_t kCachedElements =
      1 << 20;  // 4 MB of float32; more would only push other data out of the caches
  const bool stream = plan.layout.elements() > kCachedElements;
  BlockRow(chunks).ForEach(
      parallel_for, 3, [&](const Piece& piece, int64_t block, int64_t codes, int64_t scales) {
        const int64_t start = piece.BlockStart(block);
        const double scale = ReadScale(payload + scales, piece.first_block + block);
        plan.backend->decode(plan.tensors[piece.tensor].dtype, payload + codes,
                             static_cast<float>(scale * factor / shards), piece.BlockStop(block) - start,
                             book, out[piece.tensor], start, stream);
      });
}

}  // namespace hvd8bit
