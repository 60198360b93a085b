// Declarations and shape functions of the ops. What they do: hvd8bit/ops.py.
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace hvd8bit {
namespace {

using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

absl::Status CheckScalar(InferenceContext* c, const char* name) {
  std::vector<ShapeHandle> inputs;
  TF_RETURN_IF_ERROR(c->input(name, &inputs));
  ShapeHandle unused;
  return c->WithRank(inputs[0], 0, &unused);
}

absl::Status CheckVectors(InferenceContext* c, const char* name) {
  std::vector<ShapeHandle> inputs;
  TF_RETURN_IF_ERROR(c->input(name, &inputs));
  for (ShapeHandle input : inputs) {
    ShapeHandle unused;
    TF_RETURN_IF_ERROR(c->WithRank(input, 1, &unused));
  }
  return absl::OkStatus();
}

// What all workers sent for one chunk.
absl::Status CheckReceived(InferenceContext* c) {
  TF_RETURN_IF_ERROR(CheckVectors(c, "payload"));
  TF_RETURN_IF_ERROR(CheckVectors(c, "splits"));
  TF_RETURN_IF_ERROR(CheckScalar(c, "shards"));
  return CheckScalar(c, "shard");
}

// The list is `like` or `tensors`; how it is encoded is the same in all ops.
#define HVD8BIT_SETTINGS                                       \
  Attr("T: list({float, double, half, bfloat16}) >= 1")        \
      .Attr("data_type: string")                               \
      .Attr("block_size: int >= 0")                            \
      .Attr("fixed_scale: float = 0.0")                        \
      .Attr("rounding: {'nearest', 'stochastic'} = 'nearest'") \
      .Attr("slices: int >= 1 = 1")

REGISTER_OP("Hvd8bitEncodeList")
    .Input("tensors: T")
    .Input("shards: int32")
    .Input("seed: int64")
    .Output("payload: uint8")
    .Output("splits: int32")
    .HVD8BIT_SETTINGS.Attr("slice: int >= 0 = 0")
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(CheckScalar(c, "shards"));
      TF_RETURN_IF_ERROR(CheckScalar(c, "seed"));
      c->set_output(0, c->Vector(InferenceContext::kUnknownDim));
      // Only a constant that the kernel takes: a dimension of -5 would abort the process.
      const tensorflow::Tensor* shards = c->input_tensor(c->num_inputs() - 2);
      const bool known = shards != nullptr && shards->scalar<int32_t>()() >= 1;
      c->set_output(1, c->Vector(known ? static_cast<int64_t>(shards->scalar<int32_t>()())
                                       : InferenceContext::kUnknownDim));
      return absl::OkStatus();
    });

REGISTER_OP("Hvd8bitReduceShards")
    .Input("payload: uint8")
    .Input("splits: int32")
    .Input("like: T")
    .Input("shards: int32")
    .Input("shard: int32")
    .Input("seed: int64")
    .Output("reduced: uint8")
    .HVD8BIT_SETTINGS.Attr("slice: int >= 0 = 0")
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(CheckReceived(c));
      TF_RETURN_IF_ERROR(CheckScalar(c, "seed"));
      c->set_output(0, c->Vector(InferenceContext::kUnknownDim));
      return absl::OkStatus();
    });

REGISTER_OP("Hvd8bitSumShards")
    .Input("payload: uint8")
    .Input("splits: int32")
    .Input("like: T")
    .Input("shards: int32")
    .Input("shard: int32")
    .Output("sum: float")
    .Output("first: int64")
    .HVD8BIT_SETTINGS.Attr("slice: int >= 0 = 0")
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(CheckReceived(c));
      c->set_output(0, c->Vector(InferenceContext::kUnknownDim));
      c->set_output(1, c->Scalar());
      return absl::OkStatus();
    });

REGISTER_OP("Hvd8bitDecodeList")
    .Input("payloads: slices * uint8")
    .Input("like: T")
    .Input("shards: int32")
    .Input("factor: double")
    .Output("tensors: T")
    .HVD8BIT_SETTINGS.SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(CheckVectors(c, "payloads"));
      TF_RETURN_IF_ERROR(CheckScalar(c, "shards"));
      TF_RETURN_IF_ERROR(CheckScalar(c, "factor"));
      std::vector<ShapeHandle> like;
      TF_RETURN_IF_ERROR(c->input("like", &like));
      return c->set_output("tensors", like);
    });

#undef HVD8BIT_SETTINGS

REGISTER_OP("Hvd8bitCountSent").Input("bytes: int64").SetIsStateful().SetShapeFn([](InferenceContext* c) {
  return CheckScalar(c, "bytes");
});

}  // namespace
}  // namespace hvd8bit
