// The ops' kernels, for every device: check inputs, allocate, call the codec, report what is wrong as a
// status.
//
// A `Device` says what differs: how the codec is called there, and how much of what was received it can check
// before it is used. Its functions return what is wrong, or "".
//
//   std::string Prepare(const Backend** backend)    when the op is made
//   std::string Late()                              what came to light after an earlier op had returned
//   std::string CheckShards(plan, chunk, shard, slice, payload, bytes, sent)
//   std::string CheckReduced(plan, chunks, slice, payload, bytes)
//   std::string Encode(ctx, plan, chunks, slice, data, payload)
//   std::string Reduce(ctx, plan, chunk, shard, slice, payload, out, name)
//   void Sum(ctx, plan, chunk, payload, out)        on CPUs only
//   std::string Decode(ctx, plan, slices, payloads, factor, out, name)
#ifndef HVD8BIT_KERNELS_LIST_OPS_H_
#define HVD8BIT_KERNELS_LIST_OPS_H_

#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/platform/errors.h"
#include "tensorflow/core/platform/logging.h"
#include "tf_ops/codec/codebook.h"
#include "tf_ops/codec/payload.h"

namespace hvd8bit {

using tensorflow::OpInputList;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

inline DType DTypeOf(tensorflow::DataType dtype) {
  switch (dtype) {
    case tensorflow::DT_DOUBLE:
      return DType::kFloat64;
    case tensorflow::DT_HALF:
      return DType::kFloat16;
    case tensorflow::DT_BFLOAT16:
      return DType::kBFloat16;
    default:  // the op's declaration lets no other pass
      return DType::kFloat32;
  }
}

// What all ops share: settings, and the plan made of them and a call's inputs.
template <typename Device>
class ListOp : public OpKernel {
 public:
  explicit ListOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    std::string data_type;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("data_type", &data_type));
    spec_.data_type = static_cast<uint8_t>(DataTypeByName(data_type));
    OP_REQUIRES(ctx, spec_.data_type != 0,
                absl::InvalidArgumentError("data_type must be one of " + AllDataTypeNames() + ", got '" +
                                           data_type + "'"));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("block_size", &spec_.block_size));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("fixed_scale", &spec_.fixed_scale));
    std::string rounding;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("rounding", &rounding));
    spec_.rounding = rounding == "stochastic" ? Rounding::kStochastic : Rounding::kNearest;
    const std::string error = CheckSpec(spec_);
    OP_REQUIRES(ctx, error.empty(), absl::InvalidArgumentError(error));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("slices", &slices_));
    OP_REQUIRES(ctx, slices_ <= kMaxSlices,
                absl::InvalidArgumentError("slices must be at most 65535, got " + std::to_string(slices_)));
    if (ctx->HasAttr("slice")) {
      OP_REQUIRES_OK(ctx, ctx->GetAttr("slice", &slice_));
      OP_REQUIRES(ctx, slice_ < slices_,
                  absl::InvalidArgumentError("slice must be below slices, got slice " +
                                             std::to_string(slice_) + " of " + std::to_string(slices_)));
    }
    const std::string no_backend = Device::Prepare(&backend_);
    OP_REQUIRES(ctx, no_backend.empty(), absl::InvalidArgumentError(no_backend));
  }

 protected:
  absl::Status MakePlan(OpKernelContext* ctx, const OpInputList& tensors, std::unique_ptr<Plan>* plan) const {
    const Tensor* shards;
    TF_RETURN_IF_ERROR(ctx->input("shards", &shards));
    if (shards->dims() != 0 || shards->scalar<int32_t>()() < 1 || shards->scalar<int32_t>()() > kMaxShards) {
      return absl::InvalidArgumentError("shards must be a scalar in [1, " + std::to_string(kMaxShards) +
                                        "], got " + shards->DebugString());
    }
    std::vector<TensorInfo> infos;
    for (const Tensor& tensor : tensors) {
      const auto dims = tensor.shape().dim_sizes();
      infos.push_back({DTypeOf(tensor.dtype()), {dims.begin(), dims.end()}, tensor.NumElements()});
    }
    Layout layout(infos, spec_.block_size, shards->scalar<int32_t>()(), slices_);
    *plan = std::unique_ptr<Plan>(new Plan{spec_, std::move(layout), std::move(infos), backend_});
    return absl::OkStatus();
  }

  // The seed goes into the plan.
  absl::Status ReadSeed(OpKernelContext* ctx, Plan* plan) const {
    const Tensor* seed;
    TF_RETURN_IF_ERROR(ctx->input("seed", &seed));
    if (seed->dims() != 0) {
      return absl::InvalidArgumentError("seed must be a scalar, got shape " + seed->shape().DebugString());
    }
    plan->seed = seed->scalar<int64_t>()();
    return absl::OkStatus();
  }

  // Another step's chunks may have turned out to be wrong; whichever op comes next says so.
  absl::Status CheckEarlierSteps() const {
    const std::string error = Device::Late();
    if (!error.empty()) {
      LOG(ERROR) << "hvd8bit: " << error;
      return absl::InvalidArgumentError(error);
    }
    return absl::OkStatus();
  }

  // What was received is wrong. Other workers may be waiting for this one, so the cause is logged at once.
  absl::Status Wrong(const std::string& error) const {
    LOG(ERROR) << "hvd8bit: " << name() << ": " << error;
    return absl::InvalidArgumentError(name() + ": " + error);
  }

  absl::Status Done(const std::string& error) const {
    return error.empty() ? absl::OkStatus() : absl::InternalError(name() + ": " + error);
  }

  Spec spec_;
  int64_t slices_ = 1, slice_ = 0;
  const Backend* backend_ = nullptr;
};

template <typename Device>
class EncodeListOp : public ListOp<Device> {
 public:
  using ListOp<Device>::ListOp;

  void Compute(OpKernelContext* ctx) override {
    OP_REQUIRES_OK(ctx, this->CheckEarlierSteps());
    OpInputList tensors;
    OP_REQUIRES_OK(ctx, ctx->input_list("tensors", &tensors));
    std::unique_ptr<Plan> plan;
    OP_REQUIRES_OK(ctx, this->MakePlan(ctx, tensors, &plan));
    OP_REQUIRES_OK(ctx, this->ReadSeed(ctx, plan.get()));
    const auto chunks = SliceOfAllChunks(plan->layout, this->slice_);

    Tensor* splits;
    OP_REQUIRES_OK(ctx, ctx->allocate_output("splits", TensorShape({plan->layout.shards()}), &splits));
    int64_t bytes = 0;
    for (size_t shard = 0; shard < chunks.size(); ++shard) {
      OP_REQUIRES(ctx, chunks[shard].Bytes() <= std::numeric_limits<int32_t>::max(),
                  absl::InvalidArgumentError(
                      "a chunk of " + std::to_string(chunks[shard].Bytes()) +
                      " bytes cannot be sent, at most 2^31 - 1 can; use more slices, a smaller "
                      "block_size or smaller tensors"));
      splits->vec<int32_t>()(shard) = static_cast<int32_t>(chunks[shard].Bytes());
      bytes += chunks[shard].Bytes();
    }
    Tensor* payload;
    OP_REQUIRES_OK(ctx, ctx->allocate_output("payload", TensorShape({bytes}), &payload));
    std::vector<const void*> data;
    for (const Tensor& tensor : tensors) {
      data.push_back(tensor.data());
    }
    OP_REQUIRES_OK(ctx, this->Done(Device::Encode(ctx, *plan, chunks, this->slice_, data,
                                                  payload->flat<uint8_t>().data())));
  }
};

// What the two ops share that take what all workers sent for one chunk.
template <typename Device>
class ReceivingOp : public ListOp<Device> {
 public:
  using ListOp<Device>::ListOp;

 protected:
  struct Received {
    std::unique_ptr<Plan> plan;
    int64_t shard;
    Layout::Chunk chunk;
    const uint8_t* payload;
  };

  absl::Status Read(OpKernelContext* ctx, Received* received) const {
    TF_RETURN_IF_ERROR(this->CheckEarlierSteps());
    OpInputList like;
    TF_RETURN_IF_ERROR(ctx->input_list("like", &like));
    TF_RETURN_IF_ERROR(this->MakePlan(ctx, like, &received->plan));
    const Tensor *payload, *splits, *shard;
    TF_RETURN_IF_ERROR(ctx->input("payload", &payload));
    TF_RETURN_IF_ERROR(ctx->input("splits", &splits));
    TF_RETURN_IF_ERROR(ctx->input("shard", &shard));
    if (payload->dims() != 1 || splits->dims() != 1 || shard->dims() != 0) {
      return absl::InvalidArgumentError("payload and splits must be vectors and shard a scalar, got shapes " +
                                        payload->shape().DebugString() + ", " +
                                        splits->shape().DebugString() + " and " +
                                        shard->shape().DebugString());
    }
    const Plan& plan = *received->plan;
    received->shard = shard->scalar<int32_t>()();
    if (received->shard < 0 || received->shard >= plan.layout.shards()) {
      return absl::InvalidArgumentError("shard must be in [0, " + std::to_string(plan.layout.shards()) +
                                        "), got " + std::to_string(received->shard));
    }
    const auto flat = splits->vec<int32_t>();
    const std::vector<int64_t> sent(flat.data(), flat.data() + flat.size());
    received->chunk = plan.layout.GetChunk(received->shard, this->slice_);
    received->payload = payload->flat<uint8_t>().data();
    const std::string error = Device::CheckShards(plan, received->chunk, received->shard, this->slice_,
                                                  received->payload, payload->NumElements(), sent);
    return error.empty() ? absl::OkStatus() : this->Wrong(error);
  }
};

template <typename Device>
class ReduceShardsOp : public ReceivingOp<Device> {
 public:
  using ReceivingOp<Device>::ReceivingOp;

  void Compute(OpKernelContext* ctx) override {
    typename ReceivingOp<Device>::Received received;
    OP_REQUIRES_OK(ctx, this->Read(ctx, &received));
    OP_REQUIRES_OK(ctx, this->ReadSeed(ctx, received.plan.get()));
    Tensor* reduced;
    OP_REQUIRES_OK(ctx, ctx->allocate_output("reduced", TensorShape({received.chunk.Bytes()}), &reduced));
    OP_REQUIRES_OK(
        ctx, this->Done(Device::Reduce(ctx, *received.plan, received.chunk, received.shard, this->slice_,
                                       received.payload, reduced->flat<uint8_t>().data(), this->name())));
  }
};

// On CPUs only: what error feedback needs beside the encoded sum.
template <typename Device>
class SumShardsOp : public ReceivingOp<Device> {
 public:
  using ReceivingOp<Device>::ReceivingOp;

  void Compute(OpKernelContext* ctx) override {
    typename ReceivingOp<Device>::Received received;
    OP_REQUIRES_OK(ctx, this->Read(ctx, &received));
    const Elements elements = ElementsOf(*received.plan, received.chunk);
    Tensor *sum, *first;
    OP_REQUIRES_OK(ctx, ctx->allocate_output("sum", TensorShape({elements.count}), &sum));
    OP_REQUIRES_OK(ctx, ctx->allocate_output("first", TensorShape({}), &first));
    first->scalar<int64_t>()() = elements.first;
    Device::Sum(ctx, *received.plan, received.chunk, received.payload, sum->flat<float>().data());
  }
};

template <typename Device>
class DecodeListOp : public ListOp<Device> {
 public:
  using ListOp<Device>::ListOp;

  void Compute(OpKernelContext* ctx) override {
    OP_REQUIRES_OK(ctx, this->CheckEarlierSteps());
    OpInputList payloads, like;
    OP_REQUIRES_OK(ctx, ctx->input_list("payloads", &payloads));
    OP_REQUIRES_OK(ctx, ctx->input_list("like", &like));
    std::unique_ptr<Plan> plan;
    OP_REQUIRES_OK(ctx, this->MakePlan(ctx, like, &plan));
    const Tensor* factor;
    OP_REQUIRES_OK(ctx, ctx->input("factor", &factor));
    OP_REQUIRES(
        ctx, factor->dims() == 0,
        absl::InvalidArgumentError("factor must be a scalar, got shape " + factor->shape().DebugString()));

    std::vector<std::vector<Layout::Chunk>> slices;
    std::vector<const uint8_t*> received;
    for (int64_t slice = 0; slice < this->slices_; ++slice) {
      slices.push_back(SliceOfAllChunks(plan->layout, slice));
      const Tensor& payload = payloads[static_cast<int>(slice)];
      received.push_back(payload.flat<uint8_t>().data());
      const std::string error =
          Device::CheckReduced(*plan, slices.back(), slice, received.back(), payload.NumElements());
      OP_REQUIRES(ctx, error.empty(), this->Wrong(error));
    }

    // A tensor that nobody else holds is overwritten: no second copy of the gradients.
    int first_like, last_like;
    OP_REQUIRES_OK(ctx, this->InputRange("like", &first_like, &last_like));
    std::vector<void*> out;
    for (int i = 0; i < like.size(); ++i) {
      Tensor* tensor;
      OP_REQUIRES_OK(ctx,
                     ctx->forward_input_or_allocate_output({first_like + i}, i, like[i].shape(), &tensor));
      out.push_back(tensor->data());
    }
    OP_REQUIRES_OK(ctx, this->Done(Device::Decode(ctx, *plan, slices, received, factor->scalar<double>()(),
                                                  out, this->name())));
  }
};

}  // namespace hvd8bit

#endif  // HVD8BIT_KERNELS_LIST_OPS_H_
