"""`split` makes parallel layers of a model's plain ones, `merge` plain ones of parallel ones; with their weights."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from hvd8bit.compression import EightBit
from hvd8bit.parallel.boundary import comm_of
from hvd8bit.parallel.layers import (
    ColumnParallelConv2D,
    ColumnParallelDense,
    ParallelEmbedding,
    RowParallelDense,
    layers_for,
)
from hvd8bit.parallel.layers_base import ParallelLayer, compressions_of, process_set_of
from hvd8bit.variables import name_of

_PATCHES = "_patches"
_BY_PLACE = "abcd,bcde->abce"
_KERNELS = ("kernel_initializer", "bias_initializer", "use_bias")
_NOT_SPLIT = ("kernel_regularizer", "bias_regularizer", "embeddings_regularizer", "kernel_constraint",
              "bias_constraint", "embeddings_constraint", "lora_rank")  # fmt: skip


def merge(model):
    """A model of plain Keras layers with the weights of all workers, which needs no hvd8bit.

    Args:
      model: a functional or sequential Keras model, built, with layers of `hvd8bit.parallel`; also nested. All workers
        must call it.

    Returns:
      A new model, the same on all workers, not compiled. A LocallyConnected2D becomes Keras 2's layer of this name; in
      Keras 3, which has none, a small Sequential of a fixed Conv2D that cuts the windows and an EinsumDense that weighs
      them.

    Raises:
      ValueError: the model is not built, or of another kind, or has weights of its own; or a parallel layer is inside
        another layer, such as TimeDistributed.
    """
    keras = _keras_of(model)

    def plain(layer):
        if isinstance(layer, ParallelLayer):
            return _plain(layer, keras)
        within = [one.name for one in layer._flatten_layers() if isinstance(one, ParallelLayer)]
        if within and not _is_graph(layer, keras):
            raise ValueError(
                f"layer {layer.name!r} of type {type(layer).__name__} must hold no parallel layer where its model is "
                f"merged, got {within}: merge replaces layers of functional and sequential models only; make such a "
                "model of it"
            )
        return None

    merged = _converted(model, plain, keras)
    _carry(model, merged, keras)
    return merged


def split(model, layers=None, *, compression=EightBit, process_set=None):
    """A model whose layers the workers share, with the weights of a plain one.

        split(model)                                                every Dense, Embedding, LocallyConnected2D
        split(model, ["fc1", "fc2"])                                these layers
        split(model, {"fc1": {"gather_output": False}, "fc2": {"split": "row", "input_is_parallel": True}})

    Args:
      model: a functional or sequential Keras model, built, with the same weights on all workers.
      layers: None; or names of layers; or a mapping from names to settings of the parallel layer: "split" ("column" or
        "row", for a Dense), gather_output, input_is_parallel, compression. None leaves out Dense layers with fewer
        units than workers. Conv2D layers are split where they are named.
      compression, process_set: of all layers, as in `ColumnParallelDense`.

    Returns:
      A new model, not compiled: `merge` gives the plain one again, whatever the number of workers.

    Raises:
      ValueError: a name is not that of a layer that can be split, or a layer has a regularizer or constraint; or the
        model is none that `merge` takes.
    """
    keras = _keras_of(model)
    workers = comm_of(process_set_of(process_set, compressions_of(compression))).size()
    chosen: dict = {}
    if layers is not None:
        chosen = dict(layers) if isinstance(layers, Mapping) else {name: {} for name in layers}
    left = set(chosen)

    def parallel(layer):
        if layers is None:
            if _kind(layer, keras) in (None, "Conv2D") or _units(layer, keras) < workers:
                return None
        elif layer.name not in chosen:
            return None
        left.discard(layer.name)
        settings = {"compression": compression, "process_set": process_set, **chosen.get(layer.name, {})}
        return _parallel(layer, keras, settings)

    result = _converted(model, parallel, keras)
    if left:
        raise ValueError(
            f"layers must be names of layers of model {model.name!r}, got {sorted(left)}; it has "
            f"{[layer.name for layer in model.layers]}"
        )
    _carry(model, result, keras)
    return result


# ---- models ----


def _keras_of(model):
    """The Keras that a model is of."""
    for base in type(model).__mro__:
        top = base.__module__.partition(".")[0]
        if top in ("keras", "tf_keras"):
            return importlib.import_module(top)
    raise TypeError(f"model must be a Keras model, got {model!r} of {type(model)}")


def _is_graph(model, keras) -> bool:
    """Whether a model is functional or sequential: its layers and how they are joined are known."""
    return (
        isinstance(model, keras.Sequential)
        or bool(getattr(model, "_is_graph_network", False))
        or (type(model).__name__ == "Functional")
    )


def _converted(model, convert, keras):
    """A copy of the model with `convert(layer)` in the place of each layer where it is not None."""
    if not _is_graph(model, keras):
        raise ValueError(
            f"model must be functional or sequential, got {model.name!r} of {type(model).__name__}: of others Keras "
            "does not know how the layers are joined; convert their layers one by one"
        )
    if not model.built or not model.inputs:
        raise ValueError(f"model {model.name!r} must be built, or start with an Input: its layers have no weights yet")
    of_layers = {id(weight) for layer in model.layers for weight in layer.weights}
    own = [name_of(weight) for weight in model.weights if id(weight) not in of_layers]
    if own:
        raise ValueError(
            f"model {model.name!r} must have no weights but those of its layers, got {own}: a functional or sequential "
            "copy has no place for them; put them into a layer"
        )

    def clone(layer):
        new = convert(layer)
        if new is not None:
            return new
        if _is_graph(layer, keras):
            return _converted(layer, convert, keras)
        return type(layer).from_config(layer.get_config())

    copy = keras.models.clone_model(model, clone_function=clone)
    if isinstance(copy, keras.Sequential) and not copy.built:
        copy.build(model.input_shape)
    return copy


def _carry(source, target, keras) -> None:
    """Gives a converted model the weights of the one that it was made of; in this order on all workers."""
    for old in source.layers:
        if not old.weights:
            continue
        new = target.get_layer(old.name)
        if isinstance(old, ParallelLayer):
            _set_plain(new, old.whole_weights(), keras)
        elif isinstance(new, ParallelLayer):
            new.set_whole_weights(_whole_of_plain(old, keras))
        elif _is_graph(old, keras):
            _carry(old, new, keras)
        else:
            new.set_weights(old.get_weights())


# ---- layers ----


def _kind(layer, keras) -> str | None:
    """Which plain layer it is, of those that can be split."""
    for name in ("Dense", "Conv2D", "Embedding", "LocallyConnected2D"):
        cls = getattr(keras.layers, name, None)
        if cls is not None and type(layer) is cls:
            return name
    if isinstance(layer, keras.Sequential) and len(layer.layers) == 2:
        first, second = layer.layers
        einsum = getattr(keras.layers, "EinsumDense", ())
        if first.name.endswith(_PATCHES) and isinstance(second, einsum) and second.equation == _BY_PLACE:
            return "LocallyConnected2D"
    return None


def _units(layer, keras) -> int:
    """The size along which a plain layer would be split."""
    if _kind(layer, keras) == "Embedding":
        return layer.input_dim
    if isinstance(layer, keras.Sequential):
        return layer.layers[1].kernel.shape[-1]
    return getattr(layer, "units", None) or layer.filters


def _plain(layer, keras):
    """The plain layer, without its weights, of a parallel one."""
    config = layer.get_config()
    common = {"name": layer.name, "trainable": layer.trainable, "dtype": config["dtype"]}
    if isinstance(layer, ParallelEmbedding):
        taken = ("input_dim", "output_dim", "embeddings_initializer", "mask_zero")
        return keras.layers.Embedding.from_config({**common, **{key: config[key] for key in taken}})
    common.update({key: config[key] for key in (*_KERNELS, "activation")})
    if isinstance(layer, (ColumnParallelDense, RowParallelDense)):
        return keras.layers.Dense.from_config({**common, "units": layer.units})
    common.update({key: config[key] for key in ("filters", "kernel_size", "strides", "padding", "data_format")})
    if isinstance(layer, ColumnParallelConv2D):
        return keras.layers.Conv2D.from_config({**common, "dilation_rate": config["dilation_rate"]})
    if layer.data_format != "channels_last":
        raise ValueError(
            f"data_format of layer {layer.name!r} must be 'channels_last' for a plain layer, got {layer.data_format!r}"
        )
    if hasattr(keras.layers, "LocallyConnected2D"):
        if layer.padding != "valid":
            raise ValueError(
                f"padding of layer {layer.name!r} must be 'valid' for Keras 2's LocallyConnected2D, got "
                f"{layer.padding!r}"
            )
        return keras.layers.LocallyConnected2D.from_config(common)
    return _by_place(layer, common, keras)


def _by_place(layer, config: dict, keras):
    """LocallyConnected2D of layers that Keras 3 has: windows as channels, then weights for each place."""
    window = layer._parts["kernel"][0][1]
    cut = keras.layers.Conv2D(
        window,
        layer.kernel_size,
        strides=layer.strides,
        padding=layer.padding,
        use_bias=False,
        trainable=False,
        data_format="channels_last",
        dtype=config["dtype"],
        name=layer.name + _PATCHES,
    )
    weigh = keras.layers.EinsumDense(
        _BY_PLACE,
        output_shape=(*layer.places, layer.filters),
        activation=config["activation"],
        bias_axes="bce" if layer.use_bias else None,
        kernel_initializer=config["kernel_initializer"],
        bias_initializer=config["bias_initializer"],
        dtype=config["dtype"],
        name=f"{layer.name}_weights",
    )
    rows, columns = layer.input_places
    channels = window // (layer.kernel_size[0] * layer.kernel_size[1])
    start = keras.Input((rows, columns, channels), dtype=layer.compute_dtype)
    sequence = keras.Sequential([start, cut, weigh], name=layer.name)
    sequence.trainable = layer.trainable
    cut.trainable = False
    return sequence


def _parallel(layer, keras, settings: dict):
    """The parallel layer, without its weights, of a plain one."""
    classes = layers_for(keras)
    kind = _kind(layer, keras)
    how = settings.pop("split", "column")
    if kind is None:
        raise ValueError(
            f"layer {layer.name!r} of type {type(layer).__name__} cannot be split: only Dense, Conv2D, Embedding and "
            "LocallyConnected2D can; leave it out of layers"
        )
    if how not in ("column", "row") or (how == "row" and kind != "Dense"):
        raise ValueError(
            f"split of layer {layer.name!r}, a {kind}, must be 'column', or 'row' for a Dense, got {how!r}"
        )
    if isinstance(layer, keras.Sequential):
        return _from_places(layer, classes, settings)
    config = layer.get_config()
    for name in _NOT_SPLIT:
        if config.get(name) is not None:
            raise ValueError(
                f"{name} of layer {layer.name!r} must be None where it is split, got {config[name]!r}: it would see a "
                "part of the weight; leave the layer out of layers, or take weight_decay of the optimizer"
            )
    if kind == "LocallyConnected2D" and (config["implementation"], config["data_format"]) != (1, "channels_last"):
        raise ValueError(
            f"layer {layer.name!r} must have implementation=1 and data_format='channels_last' where it is split, got "
            f"{config['implementation']} and {config['data_format']!r}"
        )
    if config.get("groups", 1) != 1:
        raise ValueError(f"groups of layer {layer.name!r} must be 1 where it is split, got {config['groups']}")
    common = {"name": layer.name, "trainable": layer.trainable, "dtype": config["dtype"], **settings}
    if kind == "Embedding":
        taken = ("input_dim", "output_dim", "embeddings_initializer", "mask_zero")
        return classes.ParallelEmbedding.from_config({**common, **{key: config[key] for key in taken}})
    common.update({key: config[key] for key in (*_KERNELS, "activation")})
    if kind == "Dense":
        cls = classes.RowParallelDense if how == "row" else classes.ColumnParallelDense
        return cls.from_config({**common, "units": layer.units})
    common.update({key: config[key] for key in ("filters", "kernel_size", "strides", "padding", "data_format")})
    if kind == "Conv2D":
        return classes.ColumnParallelConv2D.from_config({**common, "dilation_rate": config["dilation_rate"]})
    return classes.LocallyConnected2D.from_config(common)


def _from_places(sequence, classes, settings: dict):
    cut, weigh = (layer.get_config() for layer in sequence.layers)
    return classes.LocallyConnected2D.from_config(
        {
            **{key: cut[key] for key in ("kernel_size", "strides", "padding", "data_format")},
            **{key: weigh[key] for key in ("activation", "kernel_initializer", "bias_initializer", "dtype")},
            "use_bias": weigh["bias_axes"] is not None,
            "filters": sequence.layers[1].kernel.shape[-1],
            "name": sequence.name,
            "trainable": sequence.layers[1].trainable,
            **settings,
        }
    )


# ---- weights: those of a plain layer are those of a whole one, but for Keras' LocallyConnected2D ----


def _set_plain(layer, whole: list, keras) -> None:
    if isinstance(layer, keras.Sequential):
        import numpy as np

        cut, weigh = layer.layers
        kernel = cut.kernel.shape
        # Channel k of the cut is element k of the window.
        cut.set_weights([np.eye(kernel[-1], dtype=whole[0].dtype).reshape(kernel)])
        places = weigh.kernel.shape
        weigh.set_weights([whole[0].reshape(places), *whole[1:]])
        return
    layer.set_weights(whole)


def _whole_of_plain(layer, keras) -> list:
    if not isinstance(layer, keras.Sequential):
        return layer.get_weights()
    kernel, *bias = layer.layers[1].get_weights()
    rows, columns, window, filters = kernel.shape
    return [kernel.reshape(rows * columns, window, filters), *bias]
