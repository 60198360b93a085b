"""What a worker computes in a step: layers with parameters, activations and FLOPs, by hand or from YAML."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Iterable
from typing import Any

SPLITS = ("data", "model")
FORWARD_SHARE = 1 / 3
"""Of a layer's time: the backward pass multiplies twice, for the inputs' and for the weights' gradient."""
_BUNDLED = pathlib.Path(__file__).with_name("workloads")


@dataclasses.dataclass(frozen=True)
class Layer:
    """One layer.

    Attributes:
      name: unique in its workload.
      parameters: trainable numbers; their gradients are exchanged.
      activations: numbers in the layer's output, per sample.
      flops: floating-point operations of the forward pass, per sample; a multiply and an add are two.
      split: "data", or "model" for a layer that the hybrid scheme splits over the workers.
    """

    name: str
    parameters: int
    activations: int
    flops: float
    split: str = "data"

    def __post_init__(self) -> None:
        for field in ("parameters", "activations", "flops"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
                raise ValueError(f"{field} of layer {self.name!r} must be a number of at least 0, got {value!r}")
        if self.split not in SPLITS:
            raise ValueError(f"split of layer {self.name!r} must be one of {', '.join(SPLITS)}, got {self.split!r}")


@dataclasses.dataclass(frozen=True)
class Workload:
    """The layers of a model in forward order, and a worker's step.

    Attributes:
      layers: at least one.
      step_s: seconds that one worker alone takes for a step (forward, backward, update) with its own samples;
        None where it is not known yet.
      samples: of a worker in a step.
      name, source: for people.
    """

    layers: tuple[Layer, ...]
    step_s: float | None = None
    samples: int = 32
    name: str = ""
    source: str = ""

    def __init__(
        self,
        layers: Iterable[Layer],
        step_s: float | None = None,
        samples: int = 32,
        name: str = "",
        source: str = "",
    ):
        for field, value in (
            ("layers", tuple(layers)),
            ("step_s", step_s),
            ("samples", samples),
            ("name", name),
            ("source", source),
        ):
            object.__setattr__(self, field, value)
        if not self.layers:
            raise ValueError("layers must hold at least one Layer, got none")
        if step_s is not None and not 0 < step_s < math.inf:
            raise ValueError(f"step_s must be above 0, in seconds, got {step_s}")
        if not isinstance(samples, int) or samples < 1:
            raise ValueError(f"samples must be an integer of at least 1, got {samples!r}")

    def timed(self, step_s: float, samples: int | None = None) -> Workload:
        """The same layers with a measured step."""
        return Workload(self.layers, step_s, samples or self.samples, self.name, self.source)

    @property
    def parameters(self) -> int:
        """Of all layers."""
        return sum(layer.parameters for layer in self.layers)

    @property
    def flops(self) -> float:
        """Of a forward pass, per sample."""
        return sum(layer.flops for layer in self.layers)

    def compute_s(self) -> list[tuple[float, float]]:
        """Forward and backward seconds of each layer: the step, shared out by FLOPs.

        Raises:
          ValueError: step_s is not known.
        """
        if self.step_s is None:
            raise ValueError("step_s of the workload is needed, one worker's seconds per step: use timed(step_s)")
        total = self.flops
        shares = [layer.flops / total if total else 1 / len(self.layers) for layer in self.layers]
        return [(self.step_s * share * FORWARD_SHARE, self.step_s * share * (1 - FORWARD_SHARE)) for share in shares]


def bundled() -> list[str]:
    """Names of the workloads in the package."""
    return sorted(path.stem for path in _BUNDLED.glob("*.yaml"))


def load(name_or_path: str) -> Workload:
    """A bundled workload by its name, or one from a .yaml file.

    The file has `name`, `source`, `samples` (per worker and step) and `layers`: a list of mappings with the
    fields of `Layer`.

    Args:
      name_or_path: one of `bundled()`, whatever its case, or a path that ends in .yaml or .yml.

    Raises:
      ValueError: no such workload, or the file is not like that.
    """
    name = name_or_path.lower().replace("_", "-")
    path = pathlib.Path(name_or_path)
    if name in bundled():
        path = _BUNDLED / f"{name}.yaml"
    elif path.suffix not in (".yaml", ".yml"):
        raise ValueError(
            f"model must be one of {', '.join(bundled())}, or a .yaml file of layers, got {name_or_path!r}; hvd8bit "
            "predict also takes keras:NAME with a NAME of keras.applications, such as keras:MobileNetV2, and a saved "
            "Keras model: a .keras or .h5 file, or a folder"
        )
    content = read_yaml(path)
    try:
        return Workload(
            [Layer(**layer) for layer in content["layers"]],
            samples=content.get("samples", 32),
            name=content.get("name", path.stem),
            source=content.get("source", ""),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} must have name, source, samples and layers, a list of name, parameters, activations, "
            f"flops and split: {error}"
        ) from error


def read_yaml(path: pathlib.Path) -> Any:
    """The content of a YAML file. Raises ValueError where it is no YAML."""
    import yaml

    # The parser in C where PyYAML has it: ten times as fast.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    with path.open(encoding="utf-8") as text:
        try:
            return yaml.load(text, Loader=loader)
        except yaml.YAMLError as error:
            raise ValueError(f"{path} is no YAML: {error}") from error
