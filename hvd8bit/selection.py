"""Which tensors travel in 8 bits, how, and which as they are."""

from __future__ import annotations

import dataclasses
import fnmatch
import numbers
from collections.abc import Iterable, Mapping
from typing import Any, Callable, Union

from hvd8bit.encoding import Encoding
from hvd8bit.modes import SCATTER_REDUCE, pays

ENCODABLE = ("float32", "float64", "float16", "bfloat16")
SPARSE = ("exact", "compress")
_EXAMPLE = """{"*embed*": {"data_type": "linear"}}"""
_ENCODING_FIELDS = tuple(field.name for field in dataclasses.fields(Encoding))

Rule = Union[str, Callable[[Any], bool]]
"""What picks variables: a pattern of names, or a function of the variable."""


@dataclasses.dataclass(frozen=True, repr=False)
class Selection:
    """Rules that select the tensors to encode. Must be the same on all workers.

    `min_elements` is for all compressors. The others need to know the variables, or the list of gradients, and belong
    to hvd8bit's own optimizer and tape; a bare `compression=EightBit(select=...)` refuses them by name.

    A rule is a pattern in the manner of file names, compared with the variable's name (Keras 3: its path, such as
    "dense/kernel") as a whole and with regard to case: * is any text, slashes included, ? any character, [ab] one of
    these; or a function that is given the variable and returns whether it is meant.

    Attributes:
      min_elements: smaller tensors travel as they are; they gain little and biases and norms lose most. A
        threshold above 0 also rises to where 8 bits, with headers and scales, are fewer bytes than float32 for the
        number of workers. 0 encodes every float tensor, even where float32 would be smaller.
      exclude: a rule or several: what they mean travels as it is, exactly.
      include: a rule or several: only what they mean is encoded. `exclude` wins. None: everything.
      per_variable: mapping of a rule to other settings of the encoding for what it means, `{"data_type": "linear",
        "block_size": 256}`, or to None: exactly. The first rule that fits counts.
      start_step: in steps before this one everything travels as it is.
      sparse: "exact", or "compress": values of sparse gradients (IndexedSlices) travel in 8 bits, their indices
        exactly.

    Raises:
      ValueError or TypeError: an argument is not one of the above; the message names it.
    """

    min_elements: int = 1024
    exclude: Any = ()
    include: Any = None
    per_variable: Any = ()
    start_step: int = 0
    sparse: str = "exact"

    def __post_init__(self):
        _check_count("min_elements", self.min_elements, "; 0 encodes every float tensor")
        _check_count("start_step", self.start_step, "; 0 compresses from the first step on")
        if self.sparse not in SPARSE:
            raise ValueError(f"sparse must be one of {', '.join(SPARSE)}, got {self.sparse!r}")
        # Workers compare settings as text, and Horovod by hash.
        object.__setattr__(self, "min_elements", int(self.min_elements))
        object.__setattr__(self, "start_step", int(self.start_step))
        object.__setattr__(self, "exclude", _rules("exclude", self.exclude))
        object.__setattr__(self, "include", None if self.include is None else _rules("include", self.include))
        object.__setattr__(self, "per_variable", _changes(self.per_variable))

    def __repr__(self):
        shown = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value == field.default:
                continue
            if field.name == "per_variable":
                text = ", ".join(f"{_shown(rule)}: {None if c is None else dict(c)!r}" for rule, c in value)
                text = f"{{{text}}}"
            elif field.name in ("exclude", "include"):
                text = f"[{', '.join(map(_shown, value))}]"
            else:
                text = repr(value)
            shown.append(f"{field.name}={text}")
        return f"Selection({', '.join(shown)})"

    def for_wrappers(self) -> list[str]:
        """Names of the rules in use that take a wrapper, which knows variables and steps."""
        names = ("exclude", "include", "per_variable", "start_step", "sparse")
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        return [name for name in names if getattr(self, name) != defaults[name]]

    def encoding_for(self, name: str, variable, encoding: Encoding) -> tuple[Encoding | None, str]:
        """How the rules want a variable's gradient encoded, or None, and why then it is not.

        Args:
          name: the variable's name.
          variable: the variable, for rules that are functions.
          encoding: the compressor's.
        """
        for rule in self.exclude:
            if _means(rule, name, variable):
                return None, f"excluded by {_shown(rule)}"
        if self.include is not None and not any(_means(rule, name, variable) for rule in self.include):
            return None, "not included"
        for rule, changes in self.per_variable:
            if _means(rule, name, variable):
                if changes is None:
                    return None, f"exact by {_shown(rule)}"
                return dataclasses.replace(encoding, **dict(changes)), ""
        return encoding, ""

    def idle_patterns(self, names: list[str]) -> list[str]:
        """Patterns that fit none of the names: misspelt, perhaps."""
        rules = [*self.exclude, *(self.include or ()), *(rule for rule, _ in self.per_variable)]
        patterns = [rule for rule in rules if isinstance(rule, str)]
        return [pattern for pattern in patterns if not any(_means(pattern, name, None) for name in names)]

    def reason_to_pass(
        self, dtype: str, elements: int | None, workers: int | None, encoding: Encoding, mode: str = SCATTER_REDUCE
    ) -> str | None:
        """Why a tensor is not encoded, or None if it is.

        Args:
          dtype: name of the tensor's dtype.
          elements: number of elements, or None where it is not known when the graph is built: encoded.
          workers: how many workers exchange it alone; None where it travels with others: `bucket_pays` judges those.
          encoding: how it would be encoded.
          mode: how it would be exchanged, one of `hvd8bit.modes.MODES`.
        """
        if dtype not in ENCODABLE:
            return f"{dtype}: only {', '.join(ENCODABLE)} are compressed"
        if elements is None or self.min_elements == 0:
            return None
        if elements < self.min_elements:
            return f"fewer than min_elements={self.min_elements} elements"
        if workers is not None and not pays((elements,), workers, encoding.block_size, mode):
            return f"no fewer bytes in 8 bits than in float32 with {workers} workers"
        return None

    def bucket_pays(
        self, sizes: tuple[int | None, ...], encoding: Encoding, workers: int, mode: str = SCATTER_REDUCE
    ) -> bool:
        """Whether tensors of these sizes, which travel together, are to be encoded."""
        known = tuple(size for size in sizes if size is not None)
        return self.min_elements == 0 or len(known) < len(sizes) or pays(known, workers, encoding.block_size, mode)


def _check_count(argument: str, value, about_zero: str) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{argument} must be an integer, got {value!r}")
    if value < 0:
        raise ValueError(f"{argument} must be at least 0, got {value}{about_zero}")


def _rules(argument: str, value) -> tuple[Rule, ...]:
    rules = (value,) if isinstance(value, str) or callable(value) else value
    if not isinstance(rules, Iterable):
        raise TypeError(
            f"{argument} must be a pattern of names, a function of a variable, or a list of these, got {value!r}; "
            "leave it out for no rule"
        )
    rules = tuple(rules)
    for rule in rules:
        if not isinstance(rule, str) and not callable(rule):
            raise TypeError(f"{argument} must be patterns of names or functions of a variable, got {rule!r}")
    return rules


def _changes(value) -> tuple[tuple[Rule, tuple[tuple[str, Any], ...] | None], ...]:
    try:
        pairs = [(rule, changes) for rule, changes in (value.items() if isinstance(value, Mapping) else value)]
    except (TypeError, ValueError):
        raise TypeError(
            f"per_variable must be a mapping of rules to settings, {_EXAMPLE}, got {value!r}; leave it out for no rule"
        ) from None
    checked = []
    for rule, changes in pairs:
        (rule,) = _rules("per_variable", [rule])
        if changes is not None:
            try:
                changes = dict(changes)
            except (TypeError, ValueError):
                raise TypeError(
                    f"per_variable[{_shown(rule)}] must be a mapping of settings to values, as in {_EXAMPLE}, or None, "
                    f"got {changes!r}"
                ) from None
            unknown = sorted(map(str, set(changes) - set(_ENCODING_FIELDS)))
            if unknown:
                raise ValueError(
                    f"per_variable[{_shown(rule)}] must be settings of {', '.join(_ENCODING_FIELDS)}, or None, "
                    f"got {', '.join(unknown)}"
                )
            whole = Encoding(**changes)  # raises where a value is out of range
            changes = tuple((name, getattr(whole, name)) for name in sorted(changes))
        checked.append((rule, changes))
    return tuple(checked)


def _means(rule: Rule, name: str, variable) -> bool:
    if isinstance(rule, str):
        # TensorFlow's variables have names that end in ":0".
        return any(fnmatch.fnmatchcase(text, rule) for text in (name, name.rpartition(":")[0]) if text)
    if variable is None:
        raise TypeError(f"a rule that is a function, {_shown(rule)}, needs variables, got only the name {name!r}")
    return bool(rule(variable))


def _shown(rule: Rule) -> str:
    # Not the address, which differs between workers.
    return repr(rule) if isinstance(rule, str) else getattr(rule, "__qualname__", type(rule).__qualname__)
