"""What is encoded, and that it is never more bytes than float32."""

from __future__ import annotations

import hypothesis
import pytest
import tensorflow as tf
from hypothesis import strategies as st

from hvd8bit.encoding import Encoding
from hvd8bit.exchange import number_of_slices
from hvd8bit.layout import Layout, ring_bytes
from hvd8bit.selection import Selection

WORKERS = (2, 3, 4, 7, 8, 16, 64, 100, 512, 1024)
ELEMENTS = (1024, 1025, 5000, 65_537, 10**6, 2**22 - 1, 25 * 10**6, 2**25 + 1, 10**8 + 1, 10**9)


def slices_of(elements: int) -> int:
    return number_of_slices([tf.TensorSpec([elements])])


@pytest.mark.parametrize("workers", WORKERS)
def test_bytes_against_float32(workers):
    """Never above float32's ring; at most 0.26 of it from 64·N blocks on."""
    encoding, select = Encoding(), Selection()
    from_here_on = 64 * workers * encoding.block_size
    for elements in (*ELEMENTS, from_here_on, from_here_on + 1):
        if select.reason_to_pass("float32", elements, workers, encoding) is not None:
            assert elements < from_here_on
            continue
        layout = Layout([elements], workers, encoding.block_size, slices_of(elements))
        ratio = layout.wire_bytes() / ring_bytes(elements, workers)
        assert ratio <= (0.26 if elements >= from_here_on else 1), elements


@pytest.mark.parametrize("block_size", [64, 256, 65536, None])
@pytest.mark.parametrize("workers", [2, 16, 1024])
def test_bytes_at_the_threshold(workers, block_size):
    """The smallest tensor that is encoded; one smaller would be more bytes than float32, or is too small."""
    encoding, select = Encoding(block_size=block_size), Selection(min_elements=64)
    low, high = 0, 10**7
    while high - low > 1:
        middle = (low + high) // 2
        passes = select.reason_to_pass("float32", middle, workers, encoding) is not None
        low, high = (middle, high) if passes else (low, middle)
    layout = Layout([high], workers, block_size, slices_of(high))
    assert layout.wire_bytes() < ring_bytes(high, workers)
    assert low < 64 or Layout([low], workers, block_size).wire_bytes() >= ring_bytes(low, workers)


@hypothesis.given(
    sizes=st.lists(st.integers(1, 300_000), min_size=1, max_size=20),
    workers=st.sampled_from(WORKERS),
    block_size=st.sampled_from([64, 1024, 4096, None]),
)
def test_a_bucket_is_never_more_than_float32(sizes, workers, block_size):
    """Tensors that travel together are judged together: they share headers, and pad each other."""
    encoding, select = Encoding(block_size=block_size), Selection()
    chosen = tuple(s for s in sizes if select.reason_to_pass("float32", s, None, encoding) is None)
    assert chosen == tuple(s for s in sizes if s >= 1024)
    slices = number_of_slices([tf.TensorSpec([size]) for size in chosen])
    fewer = Layout(chosen, workers, block_size, slices).wire_bytes() < ring_bytes(sum(chosen), workers)
    assert select.bucket_pays(chosen, encoding, workers) == fewer
    # And what would be worth it alone is worth it in company.
    if chosen and all(select.reason_to_pass("float32", s, workers, encoding) is None for s in chosen):
        assert fewer


def test_a_bucket_of_unknown_size_or_without_a_threshold_is_encoded():
    assert not Selection().bucket_pays((2000,), Encoding(), 1024)
    assert Selection().bucket_pays((2000, None), Encoding(), 1024)
    assert Selection(min_elements=0).bucket_pays((2000,), Encoding(), 1024)


def test_float32_ring():
    assert ring_bytes(1000, 4) == 2 * 3 / 4 * 4000
    assert ring_bytes(1000, 4, element_bytes=2) == 3000


def test_4_workers_and_25_million_elements():
    """What each worker sends for an element: at most 1.53 bytes (float32 6.0, float16 3.0)."""
    elements = 25 * 10**6
    assert Layout([elements], 4, 1024, slices_of(elements)).wire_bytes() / elements <= 1.53


@pytest.mark.parametrize("elements", [0, 1, 10, 1023])
def test_small_tensors_pass(elements):
    reason = Selection().reason_to_pass("float32", elements, 2, Encoding())
    assert reason == "fewer than min_elements=1024 elements"
    assert Selection().reason_to_pass("float32", 1024, 2, Encoding()) is None


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8", "bool", "complex64", "string", "float8_e5m2"])
def test_other_dtypes_pass_whatever_min_elements_says(dtype):
    for select in (Selection(), Selection(min_elements=0)):
        reason = select.reason_to_pass(dtype, 10**6, 2, Encoding())
        assert reason == f"{dtype}: only float32, float64, float16, bfloat16 are compressed"


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_min_elements_0_encodes_every_float_tensor(dtype):
    for elements in (0, 1, 64, 10**6, None):
        assert Selection(min_elements=0).reason_to_pass(dtype, elements, 1024, Encoding()) is None


def test_unknown_sizes_are_encoded():
    assert Selection().reason_to_pass("float32", None, 1024, Encoding()) is None


def test_many_workers_raise_the_threshold():
    reason = Selection().reason_to_pass("float32", 10_000, 1024, Encoding())
    assert reason == "no fewer bytes in 8 bits than in float32 with 1024 workers"


@pytest.mark.parametrize("min_elements", [1.5, "1", None, True])
def test_min_elements_of_another_type(min_elements):
    with pytest.raises(TypeError, match="min_elements must be an integer, got"):
        Selection(min_elements=min_elements)


def test_negative_min_elements():
    with pytest.raises(ValueError, match="min_elements must be at least 0, got -1; 0 encodes every float tensor"):
        Selection(min_elements=-1)


@pytest.mark.parametrize(
    ("shapes", "slices"),
    [
        ([[]], 1),
        ([[0]], 1),
        ([[2**22 - 1]], 1),
        ([[2**22]], 2),
        ([[2**21], [2**20, 2]], 2),
        ([[25_000_000]], 11),
        ([[2**40]], 16),
        ([[None, 2**22]], 1),
        ([None], 1),
        ([[2**22], None], 1),
    ],
)
def test_number_of_slices(shapes, slices):
    assert number_of_slices([tf.TensorSpec(shape) for shape in shapes]) == slices


# Rules about variables, for hvd8bit's own wrappers.

NAMES = ["model/dense/kernel", "model/dense/bias", "model/conv_1/kernel", "table:0"]


def treated(select: Selection) -> dict[str, str]:
    """What becomes of each name: the encoding's data type, or why it is not encoded."""
    found = {}
    for name in NAMES:
        encoding, reason = select.encoding_for(name, None, Encoding())
        found[name] = reason if encoding is None else f"{encoding.data_type} {encoding.block_size}"
    return found


USUAL = "dynamic_tree 1024"


@pytest.mark.parametrize(
    ("settings", "others"),
    [
        ({}, {}),
        ({"exclude": "*/bias"}, {"model/dense/bias": "excluded by '*/bias'"}),
        ({"exclude": ["*/bias", "table"]}, {
            "model/dense/bias": "excluded by '*/bias'",
            "table:0": "excluded by 'table'",
        }),
        ({"exclude": "BIAS"}, {}),
        ({"exclude": "dense"}, {}),  # the whole name counts
        ({"include": "*kernel"}, {"model/dense/bias": "not included", "table:0": "not included"}),
        ({"include": "*dense*", "exclude": "*bias"}, {
            "model/dense/bias": "excluded by '*bias'",
            "model/conv_1/kernel": "not included",
            "table:0": "not included",
        }),
        ({"per_variable": {"*/dense/*": {"data_type": "linear"}, "*/kernel": {"block_size": 64}}}, {
            "model/dense/kernel": "linear 1024",  # the first rule that fits
            "model/dense/bias": "linear 1024",
            "model/conv_1/kernel": "dynamic_tree 64",
        }),
        ({"per_variable": {"*/bias": None}}, {"model/dense/bias": "exact by '*/bias'"}),
    ],
    ids=str,
)  # fmt: skip
def test_rules_by_name(settings, others):
    assert treated(Selection(**settings)) == {**dict.fromkeys(NAMES, USUAL), **others}


def test_rules_that_are_functions():
    def is_matrix(variable):
        return len(variable.shape) == 2

    select = Selection(include=is_matrix)
    for shape in ([3], [3, 4]):
        encoding, reason = select.encoding_for("v", tf.Variable(tf.zeros(shape)), Encoding())
        assert (encoding is not None) == (len(shape) == 2)
        assert reason == ("" if encoding else "not included")
    with pytest.raises(TypeError, match="is_matrix, needs variables, got only the name 'v'"):
        select.encoding_for("v", None, Encoding())
    assert "is_matrix" in repr(select)
    assert "0x" not in repr(select)  # workers compare this text


def test_patterns_that_fit_nothing_are_told():
    select = Selection(exclude=["*/bias", "dens/*"], include="*", per_variable={"emb*": None, len: None})
    assert select.idle_patterns(NAMES) == ["dens/*", "emb*"]


def test_repr_shows_what_is_not_usual_and_can_be_read_again():
    select = Selection(
        min_elements=0,
        exclude="*/bias",
        include=["*"],
        per_variable={"a": {"block_size": 64, "scaling": 10}, "b": None},
        start_step=7,
        sparse="compress",
    )
    assert repr(select) == (
        "Selection(min_elements=0, exclude=['*/bias'], include=['*'], per_variable={'a': {'block_size': 64, 'scaling': "
        "10.0}, 'b': None}, start_step=7, sparse='compress')"
    )
    assert eval(repr(select)) == select
    assert hash(eval(repr(select))) == hash(select)
    assert repr(Selection()) == "Selection()"


def test_what_only_wrappers_can_keep():
    assert Selection(min_elements=3).for_wrappers() == []
    everything = Selection(exclude="a", include="b", per_variable={"c": None}, start_step=1, sparse="compress")
    assert everything.for_wrappers() == ["exclude", "include", "per_variable", "start_step", "sparse"]


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"exclude": 3}, TypeError, "exclude must be a pattern of names"),
        ({"exclude": [3]}, TypeError, "exclude must be patterns of names or functions of a variable, got 3"),
        ({"include": [None]}, TypeError, "include must be patterns"),
        ({"start_step": -1}, ValueError, "start_step must be at least 0, got -1"),
        ({"start_step": 1.5}, TypeError, "start_step must be an integer, got 1.5"),
        ({"sparse": "dense"}, ValueError, "sparse must be one of exact, compress, got 'dense'"),
        ({"per_variable": {"a": {"bits": 4}}}, ValueError, r"per_variable\['a'\] must be settings of .*, got bits"),
        ({"per_variable": {"a": {"block_size": 48}}}, ValueError, "block_size must be a multiple of 64"),
        ({"per_variable": {3: None}}, TypeError, "per_variable must be patterns"),
    ],
    ids=str,
)
def test_rules_that_are_none(settings, error, message):
    with pytest.raises(error, match=message):
        Selection(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"exclude": 5}, "exclude must be a pattern of names, a function of a variable, or a list of these, got 5"),
        ({"exclude": None}, "exclude must be a pattern of names, .* got None; leave it out"),
        ({"include": 5}, "include must be a pattern of names, .* got 5"),
        ({"per_variable": 5}, "per_variable must be a mapping of rules to settings, .* got 5"),
        ({"per_variable": None}, "per_variable must be a mapping of rules to settings, .* got None"),
        ({"per_variable": ["ab", "c"]}, "per_variable must be a mapping of rules to settings"),
        ({"per_variable": {"a": 5}}, "per_variable\\['a'\\] must be a mapping of settings to values, .* got 5"),
        ({"per_variable": {"*embed*": "linear"}}, "per_variable\\['\\*embed\\*'\\] must be .* got 'linear'"),
    ],
)
def test_what_is_no_rule_is_named(settings, message):
    with pytest.raises(TypeError, match=message):
        Selection(**settings)


def test_settings_without_names_are_named():
    with pytest.raises(ValueError, match="got 5"):
        Selection(per_variable={"a": {5: 1}})
