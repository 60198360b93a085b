#include "tf_ops/codec/cuda/lists.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <limits>
#include <mutex>

#include "tf_ops/codec/codebook.h"
#include "tf_ops/codec/cuda/arguments.h"
#include "tf_ops/codec/cuda/kernels.h"
#include "tf_ops/codec/dither.h"
#include "tf_ops/codec/float_types.h"

namespace hvd8bit {
namespace cuda {
namespace {

// ------------------------------------------------------------------------------------------------------
// reports

// Memory that kernels write to when a chunk does not fit, and that the host looks into whenever it comes by.
// Calls take its places in turn; there are more than calls under way.
class Mailbox {
 public:
  // Null where there is no memory for it: what is wrong still becomes NaN, only without a message.
  Report* Claim(const std::string& who) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!allocated_) {
      allocated_ = true;
      void* memory = nullptr;
      if (AllocateHostMemory(kPlaces * sizeof(Report), &memory) == 0) {
        reports_ = static_cast<Report*>(memory);
      }
    }
    if (reports_ == nullptr) {
      return nullptr;
    }
    next_ = (next_ + 1) % kPlaces;
    who_[next_] = who;
    return &reports_[next_];
  }

  std::string Take() {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::string text;
    for (size_t i = 0; reports_ != nullptr && i < kPlaces; ++i) {
      Report& report = reports_[i];
      if (__atomic_load_n(&report.set, __ATOMIC_ACQUIRE) == 0) {
        continue;
      }
      if (text.empty()) {
        text = who_[i] + ": " +
               CompareHeaders(report.expected, report.received, "worker " + std::to_string(report.worker),
                              nullptr) +
               " (found by the GPU, where an earlier step's result became NaN)";
      }
      report.set = 0;
    }
    return text;
  }

 private:
  static constexpr size_t kPlaces = 64;
  std::mutex mutex_;
  bool allocated_ = false;
  Report* reports_ = nullptr;
  std::array<std::string, kPlaces> who_;
  size_t next_ = 0;
};

Mailbox& TheMailbox() {
  static auto* mailbox = new Mailbox;
  return *mailbox;
}

// -----------------------------------------------------------------------------------------------------
// launches

uint32_t TilesOf(int64_t elements, int64_t block_size) {
  const auto divided = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  int64_t tiles;
  if (block_size == 0) {
    tiles = divided(elements, kTileElements);
  } else if (block_size <= kTileElements) {
    tiles = divided(elements, kTileElements / block_size * block_size);
  } else {
    tiles = elements / block_size * divided(block_size, kTileElements) +
            divided(elements % block_size, kTileElements);
  }
  return static_cast<uint32_t>(tiles);
}

Arguments MakeArguments(const Plan& plan, const ChunkHeader& header) {
  const Codebook& book = GetCodebook(plan.spec.data_type);
  Arguments a;
  a.header = header;
  a.pieces = a.chunks = a.tiles = 0;
  a.fixed_scale = plan.spec.fixed_scale;
  a.block_size = plan.spec.block_size;
  a.sent = nullptr;
  a.sent_bytes = 0;
  a.shards = plan.layout.shards();
  a.factor = 0;
  a.report = nullptr;
  a.key = DitherKey(plan.seed);
  std::copy(book.magnitudes.begin(), book.magnitudes.end(), a.values);
  std::copy(book.thresholds.begin(), book.thresholds.end(), a.thresholds);
  a.first_bucket = book.first_bucket;
  return a;
}

struct ChunkInMemory {
  const Layout::Chunk* chunk;
  uint8_t* data;
  int64_t shard, slice;
};

// Scales of long blocks are found by atomic operations, which take aligned words.
std::string CheckAlignment(const Plan& plan, const uint8_t* payload) {
  const bool long_blocks = plan.spec.block_size == 0 || plan.spec.block_size > kTileElements;
  return long_blocks && reinterpret_cast<uintptr_t>(payload) % 4 != 0
             ? "the payload must start at a multiple of 4 bytes where blocks have more than " +
                   std::to_string(kTileElements) + " elements"
             : "";
}

// Spreads the pieces that `wanted` picks over as few launches as hold them.
std::string ForLaunches(Arguments a, const std::vector<ChunkInMemory>& chunks, bool empty_chunks,
                        const std::function<bool(const Piece&)>& wanted,
                        const std::function<void*(const Piece&)>& tensor,
                        const std::function<int(const Arguments&)>& launch) {
  const auto flush = [&]() -> std::string {
    if (a.chunks == 0) {
      return "";
    }
    const int error = launch(a);
    a.pieces = a.chunks = a.tiles = 0;
    return error == 0 ? "" : std::string("a CUDA kernel could not be launched: ") + ErrorText(error);
  };
  for (const ChunkInMemory& in_memory : chunks) {
    const Layout::Chunk& chunk = *in_memory.chunk;
    const auto add_chunk = [&] {
      a.chunk[a.chunks++] = {in_memory.data, static_cast<uint64_t>(chunk.code_bytes),
                             static_cast<uint32_t>(chunk.blocks), static_cast<uint32_t>(in_memory.shard),
                             static_cast<uint16_t>(in_memory.slice)};
    };
    bool added = false;
    if (empty_chunks && chunk.pieces.empty()) {
      if (a.chunks == kChunks) {
        const std::string error = flush();
        if (!error.empty()) {
          return error;
        }
      }
      add_chunk();
    }
    for (size_t i = 0; i < chunk.pieces.size(); ++i) {
      const Piece& piece = chunk.pieces[i];
      if (!wanted(piece)) {
        continue;
      }
      const int64_t elements = piece.stop - piece.start;
      const uint32_t tiles = TilesOf(elements, a.block_size);
      if (a.pieces == kPieces || (!added && a.chunks == kChunks) ||
          tiles > std::numeric_limits<uint32_t>::max() / 2 - a.tiles) {
        const std::string error = flush();
        if (!error.empty()) {
          return error;
        }
        added = false;
      }
      if (!added) {
        add_chunk();
        added = true;
      }
      const int64_t codes_end = piece.codes_offset + elements;
      const int64_t next = i + 1 < chunk.pieces.size() ? chunk.pieces[i + 1].codes_offset
                                                       : chunk.ScalesOffset() - kHeaderBytes;
      a.piece[a.pieces++] = {tensor(piece),
                             elements,
                             piece.codes_offset,
                             piece.row,
                             static_cast<uint32_t>(piece.first_block),
                             a.tiles,
                             static_cast<uint16_t>(a.chunks - 1),
                             static_cast<uint16_t>(next - codes_end)};
      a.tiles += tiles;
    }
  }
  return flush();
}

std::vector<ChunkInMemory> InMemory(const std::vector<Layout::Chunk>& chunks, int64_t slice,
                                    uint8_t* payload) {
  std::vector<ChunkInMemory> in_memory;
  for (size_t shard = 0; shard < chunks.size(); ++shard) {
    in_memory.push_back({&chunks[shard], payload, static_cast<int64_t>(shard), slice});
    payload += chunks[shard].Bytes();
  }
  return in_memory;
}

// Calls fn(dtype, whether empty chunks go along) for each dtype of the list; first for one of them, in any
// case.
template <typename Fn>
std::string ForDTypesOf(const Plan& plan, Fn fn) {
  bool present[5] = {};
  for (const TensorInfo& tensor : plan.tensors) {
    present[static_cast<int>(tensor.dtype)] |= tensor.elements > 0;
  }
  bool first = true;
  for (DType dtype : {DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16}) {
    const bool last_chance = dtype == DType::kBFloat16 && first;
    if (present[static_cast<int>(dtype)] || last_chance) {
      const std::string error = fn(dtype, first);
      if (!error.empty()) {
        return error;
      }
      first = false;
    }
  }
  return "";
}

template <typename Pointer>
std::function<void*(const Piece&)> StartOf(const Plan& plan, const std::vector<Pointer>& tensors) {
  return [&](const Piece& piece) -> void* {
    auto* bytes = static_cast<uint8_t*>(const_cast<void*>(static_cast<const void*>(tensors[piece.tensor])));
    return bytes + piece.start * DTypeBytes(plan.tensors[piece.tensor].dtype);
  };
}

}  // namespace

std::string EncodeList(const Plan& plan, const std::vector<Layout::Chunk>& chunks, int64_t slice,
                       const std::vector<const void*>& data, uint8_t* payload, void* stream) {
  const std::string misaligned = CheckAlignment(plan, payload);
  if (!misaligned.empty()) {
    return misaligned;
  }
  const Arguments a = MakeArguments(plan, MakeHeader(plan, chunks[0], 0, slice));
  return ForDTypesOf(plan, [&](DType dtype, bool empty_chunks) {
    return ForLaunches(
        a, InMemory(chunks, slice, payload), empty_chunks,
        [&](const Piece& piece) { return plan.tensors[piece.tensor].dtype == dtype; }, StartOf(plan, data),
        [&](const Arguments& launch) { return LaunchEncode(dtype, launch, stream); });
  });
}

std::string ReduceShards(const Plan& plan, const Layout::Chunk& chunk, int64_t shard, int64_t slice,
                         const uint8_t* payload, uint8_t* out, const std::string& who, void* stream) {
  const std::string misaligned = CheckAlignment(plan, out);
  if (!misaligned.empty()) {
    return misaligned;
  }
  Arguments a = MakeArguments(plan, MakeHeader(plan, chunk, shard, slice));
  // The mean is what a fixed scale was chosen for; the sum is up to `shards` times as large.
  a.fixed_scale = plan.spec.fixed_scale * static_cast<float>(plan.layout.shards());
  a.sent = payload;
  a.sent_bytes = chunk.Bytes();
  a.report = TheMailbox().Claim(who);
  return ForLaunches(
      a, {{&chunk, out, shard, slice}}, true, [](const Piece&) { return true; },
      [](const Piece&) { return nullptr; },
      [&](const Arguments& launch) { return LaunchReduce(launch, stream); });
}

std::string DecodeList(const Plan& plan, const std::vector<std::vector<Layout::Chunk>>& slices,
                       const std::vector<const uint8_t*>& payloads, double factor,
                       const std::vector<void*>& out, const std::string& who, void* stream) {
  Arguments a = MakeArguments(plan, MakeHeader(plan, slices[0][0], 0, 0));
  a.factor = factor;
  a.report = TheMailbox().Claim(who);
  std::vector<ChunkInMemory> chunks;
  for (size_t slice = 0; slice < slices.size(); ++slice) {
    const auto more =
        InMemory(slices[slice], static_cast<int64_t>(slice), const_cast<uint8_t*>(payloads[slice]));
    chunks.insert(chunks.end(), more.begin(), more.end());
  }
  return ForDTypesOf(plan, [&](DType dtype, bool empty_chunks) {
    return ForLaunches(
        a, chunks, empty_chunks,
        [&](const Piece& piece) { return plan.tensors[piece.tensor].dtype == dtype; }, StartOf(plan, out),
        [&](const Arguments& launch) { return LaunchDecode(dtype, launch, stream); });
  });
}

std::string TakeReport() { return TheMailbox().Take(); }

}  // namespace cuda
}  // namespace hvd8bit
