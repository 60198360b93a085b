"""Workloads: the bundled ones' totals, YAML files, Keras models."""

from __future__ import annotations

import pytest

from hvd8bit import speedup
from hvd8bit.speedup import Layer, Workload

TOTALS = {
    "alexnet": 61_100_840,
    "vgg16": 138_357_544,
    "resnet50": 25_557_032,
    "bert-base": 109_482_240,
    "gpt2-small": 124_439_808,
}
# Multiply-adds of a forward pass, 10^9, as they are usually counted.
MULTIPLY_ADDS = {"alexnet": 0.714, "vgg16": 15.47, "resnet50": 3.86, "bert-base": 11.2, "gpt2-small": 145.8}


def test_bundled_are_these():
    assert speedup.bundled() == sorted(TOTALS)


@pytest.mark.parametrize("name", TOTALS)
def test_parameter_totals(name):
    workload = speedup.load(name)
    assert workload.parameters == TOTALS[name]
    assert f"{TOTALS[name]:,}" in workload.source, "the file says what it counts"
    assert len({layer.name for layer in workload.layers}) == len(workload.layers)


@pytest.mark.parametrize("name", TOTALS)
def test_flops(name):
    assert speedup.load(name).flops / 2e9 == pytest.approx(MULTIPLY_ADDS[name], rel=0.01)


def test_alexnet_layer_by_layer():
    layers = {layer.name: layer for layer in speedup.load("alexnet").layers}
    assert layers["conv1"].parameters == 11 * 11 * 3 * 64 + 64
    assert layers["conv2"].flops == 2 * 5 * 5 * 64 * 192 * 27 * 27
    assert layers["fc6"].parameters == 9216 * 4096 + 4096
    assert layers["pool5"].activations == 9216
    assert [name for name, layer in layers.items() if layer.split == "model"] == ["fc6", "fc7", "fc8"]


@pytest.mark.parametrize("name", ["ResNet50", "resnet50", "BERT_base"])
def test_names_are_forgiving(name):
    assert speedup.load(name).parameters in TOTALS.values()


def test_step_is_shared_out_by_flops():
    workload = Workload([Layer("a", 1, 1, 3), Layer("b", 1, 1, 1), Layer("c", 1, 1, 0)], step_s=1.2)
    assert workload.compute_s() == [
        (pytest.approx(0.3), pytest.approx(0.6)),
        (pytest.approx(0.1), pytest.approx(0.2)),
        (0, 0),
    ]


def test_layers_without_flops_share_evenly():
    assert (
        Workload([Layer("a", 1, 1, 0), Layer("b", 1, 1, 0)], step_s=1.2).compute_s()
        == [(pytest.approx(0.2), pytest.approx(0.4))] * 2
    )


def test_yaml_file(tmp_path):
    path = tmp_path / "net.yaml"
    path.write_text(
        "name: net\nsamples: 4\nlayers:\n"
        "  - {name: a, parameters: 10, activations: 5, flops: 20}\n"
        "  - {name: b, parameters: 6, activations: 2, flops: 12, split: model}\n"
    )
    workload = speedup.load(str(path))
    assert (workload.name, workload.samples, workload.parameters) == ("net", 4, 16)
    assert workload.layers[1] == Layer("b", 6, 2, 12, "model")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("layers: [", "is no YAML"),
        ("name: x", "must have name, source, samples and layers"),
        ("- 1", "must have name, source, samples and layers"),
        ("layers: [{name: a}]", "must have name, source, samples and layers"),
        ("layers: [{name: a, parameters: 1, activations: 1, flops: 1, colour: red}]", "colour"),
        ("layers: []", "at least one Layer"),
        ("layers: [{name: a, parameters: -1, activations: 1, flops: 1}]", "parameters of layer 'a' must be"),
        ("layers: [{name: a, parameters: 1, activations: x, flops: 1}]", "activations of layer 'a' must be"),
        (
            "layers: [{name: a, parameters: 1, activations: 1, flops: 1, split: both}]",
            "must be one of data, model",
        ),
    ],
)
def test_bad_yaml_is_an_error_that_says_why(text, message, tmp_path):
    path = tmp_path / "net.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        speedup.load(str(path))


def test_unknown_model_lists_the_known():
    with pytest.raises(ValueError, match="alexnet, bert-base, gpt2-small, resnet50, vgg16"):
        speedup.load("lenet")


def test_step_is_needed():
    with pytest.raises(ValueError, match=r"step_s of the workload is needed.*timed"):
        speedup.load("alexnet").compute_s()


# ------------------------------------------------------------------------------------------ Keras


def test_bundled_vgg16_is_keras_vgg16():
    pytest.importorskip("keras")
    from hvd8bit import keras_workload

    read, bundled = keras_workload.load("keras:VGG16"), speedup.load("vgg16")
    ours = [(x.parameters, x.activations, x.flops, x.split) for x in bundled.layers]
    theirs = [(x.parameters, x.activations, x.flops, x.split) for x in read.layers if x.name != "flatten"]
    assert theirs == ours


def test_bundled_resnet50_is_keras_resnet50_but_for_the_biases():
    pytest.importorskip("keras")
    from hvd8bit import keras_workload

    read, bundled = keras_workload.load("keras:ResNet50"), speedup.load("resnet50")
    assert read.parameters == bundled.parameters + 26_560
    assert sorted((x.activations, x.flops) for x in read.layers if x.parameters) == sorted(
        (x.activations, x.flops) for x in bundled.layers if x.parameters
    )


def test_keras_layers_by_hand(tmp_path):
    keras = pytest.importorskip("keras")
    from hvd8bit import keras_workload

    inner = keras.Sequential([keras.Input((4, 4, 8)), keras.layers.DepthwiseConv2D(3, padding="same", name="depth")])
    frozen = keras.layers.Conv2D(8, 3, padding="same", name="conv")
    frozen.trainable = False
    model = keras.Sequential(
        [
            keras.Input((4, 4, 2)),
            frozen,
            inner,
            keras.layers.Flatten(name="flat"),
            keras.layers.Dense(5, name="dense"),
        ]
    )
    path = tmp_path / "model.keras"
    model.save(path)
    assert keras_workload.is_keras(str(path))
    for workload in (keras_workload.from_model(model), keras_workload.load(str(path))):
        assert workload.layers == (
            Layer("conv", 0, 128, 2 * 16 * 9 * 2 * 8),  # frozen: computed, but no gradient
            Layer("depth", 80, 128, 2 * 16 * 9 * 8),
            Layer("flat", 0, 128, 0),
            Layer("dense", 645, 5, 2 * 640, "model"),
        )


def flops_of(layer, *shapes, keras) -> float:
    from hvd8bit import keras_workload

    inputs = [keras.Input(shape) for shape in shapes]
    read = keras_workload.from_model(keras.Model(inputs, layer(*inputs)))
    return sum(found.flops for found in read.layers)


LSTM_STEP = 2 * (64 * 512 + 128 * 512)
KERAS_FLOPS = {
    "LSTM": (lambda k: k.LSTM(128), [(100, 64)], 100 * LSTM_STEP),
    "LSTM, sequences": (lambda k: k.LSTM(128, return_sequences=True), [(100, 64)], 100 * LSTM_STEP),
    "GRU": (lambda k: k.GRU(8), [(9, 4)], 9 * 2 * (4 * 24 + 8 * 24)),
    "cells": (lambda k: k.RNN([k.LSTMCell(4), k.GRUCell(3)]), [(7, 8)], 7 * 2 * (16 * 12 + 9 * 7)),
    "both ways": (lambda k: k.Bidirectional(k.LSTM(128)), [(100, 64)], 200 * LSTM_STEP),
    "both ways, sequences": (
        lambda k: k.Bidirectional(k.LSTM(128, return_sequences=True)),
        [(100, 64)],
        200 * LSTM_STEP,
    ),
    "ConvLSTM2D": (lambda k: k.ConvLSTM2D(4, 3, padding="same"), [(5, 6, 6, 2)], 5 * 36 * 2 * 9 * (2 + 4) * 16),
    "Conv2D": (lambda k: k.Conv2D(8, 3, strides=2, padding="same", groups=2), [(8, 8, 4)], 2 * 16 * 9 * 2 * 8),
    "Conv2DTranspose": (lambda k: k.Conv2DTranspose(32, 4, strides=4), [(8, 8, 64)], 4_194_304),
    "Conv1DTranspose": (lambda k: k.Conv1DTranspose(3, 4, strides=4), [(8, 5)], 2 * 8 * 4 * 5 * 3),
    "SeparableConv2D": (
        lambda k: k.SeparableConv2D(8, 3, strides=2, padding="same"),
        [(8, 8, 4)],
        2 * 16 * (9 * 4 + 4 * 8),
    ),
    "DepthwiseConv2D": (lambda k: k.DepthwiseConv2D(3, padding="same"), [(8, 8, 4)], 2 * 64 * 9 * 4),
    "PReLU": (lambda k: k.PReLU(), [(12, 12, 64)], 0),
    "LayerNormalization": (lambda k: k.LayerNormalization(axis=(1, 2)), [(12, 16)], 0),
    "BatchNormalization": (lambda k: k.BatchNormalization(), [(12, 12, 64)], 0),
    "Embedding": (lambda k: k.Embedding(1000, 16), [(12,)], 0),
    "Dense": (lambda k: k.Dense(5), [(7, 6)], 2 * 7 * 6 * 5),
    "EinsumDense": (lambda k: k.EinsumDense("abc,cde->abde", (7, 4, 3)), [(7, 6)], 2 * 7 * 6 * 4 * 3),
    "EinsumDense, ellipsis": (lambda k: k.EinsumDense("...x,xy->...y", 5), [(7, 6)], 2 * 7 * 6 * 5),
    "each step's Dense": (lambda k: k.TimeDistributed(k.Dense(5)), [(7, 6)], 2 * 7 * 6 * 5),
    "each step's transposed": (
        lambda k: k.TimeDistributed(k.Conv2DTranspose(32, 4, strides=4)),
        [(3, 8, 8, 64)],
        3 * 4_194_304,
    ),
    "each step's LSTM": (lambda k: k.TimeDistributed(k.LSTM(128)), [(3, 100, 64)], 300 * LSTM_STEP),
    "attention": (
        lambda k: k.MultiHeadAttention(2, 3, value_dim=4),
        [(7, 8), (5, 6)],
        2 * (7 * (8 * 6 + 8 * 8) + 5 * (6 * 6 + 6 * 8) + 7 * 5 * (6 + 8)),
    ),
}


@pytest.mark.parametrize("case", KERAS_FLOPS)
@pytest.mark.parametrize("version", ["keras", "tf_keras"])
def test_keras_flops(case, version):
    keras = pytest.importorskip(version)
    make, shapes, flops = KERAS_FLOPS[case]
    assert flops_of(make(keras.layers), *shapes, keras=keras) == flops


def test_a_model_at_each_step_and_a_wrapped_layer():
    keras = pytest.importorskip("keras")
    inner = keras.Sequential([keras.Input((8, 8, 64)), keras.layers.Conv2DTranspose(32, 4, strides=4)])
    assert flops_of(keras.layers.TimeDistributed(inner), (3, 8, 8, 64), keras=keras) == 3 * 4_194_304
    layer = keras.layers.SpectralNormalization(keras.layers.Conv2DTranspose(32, 4, strides=4))
    assert flops_of(layer, (8, 8, 64), keras=keras) == 4_194_304


def test_keras_sequence_of_unknown_length_is_refused():
    keras = pytest.importorskip("keras")
    with pytest.raises(ValueError, match=r"the input of layer 'lstm' has no known size, \(None, None, 3\)"):
        flops_of(keras.layers.LSTM(4, name="lstm"), (None, 3), keras=keras)


def test_keras_model_of_unknown_size_is_refused():
    keras = pytest.importorskip("keras")
    from hvd8bit import keras_workload

    model = keras.Sequential([keras.Input((None, 3)), keras.layers.Dense(5, name="dense")])
    with pytest.raises(ValueError, match=r"'dense' has no known size, \(None, None, 5\)"):
        keras_workload.from_model(model)


@pytest.mark.parametrize(
    ("model", "message"),
    [("keras:Nope", "keras:NAME with a NAME of keras.applications"), ("no.keras", "can load")],
)
def test_unknown_keras_model_is_an_error(model, message):
    pytest.importorskip("keras")
    from hvd8bit import keras_workload

    with pytest.raises(ValueError, match=message):
        keras_workload.load(model)
