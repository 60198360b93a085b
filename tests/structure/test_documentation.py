"""Every public name says what it does, what it takes, what it gives and what it raises."""

from __future__ import annotations

import inspect
import pathlib
import re
import struct

import pytest

import hvd8bit

ROOT = pathlib.Path(__file__).resolve().parents[2]


def public_things():
    """(name, thing) for the package's names and those of its public modules."""
    for name in hvd8bit.__all__:
        thing = getattr(hvd8bit, name)
        yield f"hvd8bit.{name}", thing
        if inspect.ismodule(thing):
            names = getattr(thing, "__all__", [n for n in vars(thing) if not n.startswith("_")])
            for inner in names:
                member = getattr(thing, inner)
                if getattr(member, "__module__", thing.__name__).startswith("hvd8bit"):
                    yield f"hvd8bit.{name}.{inner}", member


THINGS = {
    name: thing
    for name, thing in public_things()
    if inspect.ismodule(thing) or inspect.isclass(thing) or inspect.isroutine(thing)
}
CALLABLES = {name: thing for name, thing in THINGS.items() if not inspect.ismodule(thing)}


def parameters(thing) -> list[str]:
    """Names of the public parameters, without self."""
    function = thing.__init__ if inspect.isclass(thing) else thing
    if function is object.__init__:
        return []
    names = list(inspect.signature(function).parameters)
    return [name for name in names[inspect.isclass(thing) :] if not name.startswith("_")]


def says(doc: str, what: str) -> bool:
    """Whether a docstring names something, or refers to the docstring that does: "as `predict`"."""
    return re.search(rf"\b{what}\b", doc) is not None or re.search(r"\b(as|see|like) `", doc) is not None


@pytest.mark.parametrize("name", THINGS)
def test_has_a_docstring(name):
    doc = inspect.getdoc(THINGS[name]) or ""
    first = doc.partition("\n\n")[0]
    assert len(first.split()) >= 2, f"{name}: the docstring's first line says what it does"
    assert first.rstrip().endswith((".", ":")), f"{name}: the first paragraph is a sentence"


@pytest.mark.parametrize("name", CALLABLES)
def test_every_parameter_is_documented(name):
    doc = inspect.getdoc(CALLABLES[name]) or ""
    for parameter in parameters(CALLABLES[name]):
        assert says(doc, parameter), f"{name}: say what {parameter} is"


@pytest.mark.parametrize("name", [n for n, t in CALLABLES.items() if inspect.isroutine(t)])
def test_what_is_returned_is_documented(name):
    function = CALLABLES[name]
    annotation = str(inspect.signature(function).return_annotation)
    doc = inspect.getdoc(function) or ""
    # A first line may be what is returned, and a class of ours says itself what it is.
    noun = re.match(r"(The|A|An|How many|Number|Names?|Whether|What) ", doc)
    ours = annotation in {name.rpartition(".")[2] for name, thing in CALLABLES.items() if inspect.isclass(thing)}
    section = re.search(r"^Returns:$", doc, re.M) or re.search(r"\b(as|see) `", doc)
    assert annotation == "None" or noun or ours or section, f"{name}: a Returns section"


@pytest.mark.parametrize("name", [n for n, t in CALLABLES.items() if inspect.isclass(t)])
def test_public_members_are_documented(name):
    """Methods by a docstring; properties by one of their own or by the class's."""
    cls = CALLABLES[name]
    for member, thing in vars(cls).items():
        if not member.startswith("_") and (inspect.isroutine(thing) or isinstance(thing, property)):
            own = inspect.getdoc(getattr(cls, member))
            assert own or (isinstance(thing, property) and says(inspect.getdoc(cls) or "", member)), (
                f"{name}.{member} has no docstring"
            )


def test_the_eightbit_instance_is_documented():
    assert "data_type" in inspect.getdoc(type(hvd8bit.EightBit))


# docs/wire-format.md is the one description of the format: it must say what the code does.


def test_the_wire_formats_page_has_the_headers_fields():
    text = (ROOT / "docs" / "wire-format.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| (\d+) \| ([a-z ]+) \|", text, re.M)
    sizes = {"s": 4, "H": 2, "B": 1, "I": 4, "Q": 8}
    from hvd8bit import wire

    assert text.startswith(f"# Wire format and arithmetic, version {wire.VERSION}\n")
    formats = re.findall(r"\d*([a-zA-Z])", wire._HEADER.format.lstrip("<"))
    offset = 0
    assert len(rows) == len(formats)
    for (documented_offset, documented_bytes, _), code in zip(rows, formats):
        assert (int(documented_offset), int(documented_bytes)) == (offset, sizes[code])
        offset += sizes[code]
    assert offset == struct.calcsize(wire._HEADER.format) == 64


def test_the_wire_formats_page_has_the_numbers_of_the_names():
    from hvd8bit import datatypes, wire

    text = (ROOT / "docs" / "wire-format.md").read_text(encoding="utf-8")
    for name in datatypes.DATA_TYPES:
        assert f"{datatypes.data_type_id(name)} `{name}`" in text
    assert ", ".join(f"{number} {name}" for name, number in wire.DTYPE_IDS.items()) in text


def test_the_wire_formats_page_has_the_rule_of_auto():
    from hvd8bit import modes
    from hvd8bit.parallel import transfer

    text = " ".join((ROOT / "docs" / "wire-format.md").read_text(encoding="utf-8").split())
    assert f"at most {modes.MAX_ALLGATHER_ELEMENTS:,} elements" in text
    assert f"at most {modes.ROUND_BYTES:,} bytes more" in text
    assert f"0x{transfer.EXACT_MAGIC:X}" in text
    largest = {workers: _largest_allgather(modes, workers) for workers in (2, 3, 4, 5)}
    assert largest == {2: 65_536, 3: 65_536, 4: 65_536, 5: 40_960}
    assert "with 2 to 4 workers for all of them, with 5 up to 40,960" in text


def _largest_allgather(modes, workers: int) -> int:
    around = (40_959, 40_960, 40_961, 65_535, 65_536, 65_537)
    return max(n for n in around if modes.choose("auto", (n,), workers, 1024) == modes.ALLGATHER)


def test_the_readme_has_the_sizes_from_which_8_bits_are_fewer_bytes():
    from hvd8bit import modes
    from hvd8bit.encoding import Encoding

    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    told = re.search(r"has to be ([\d,]+) elements on ([\d,]+) workers, ([\d,]+) on ([\d,]+),", text)
    assert told
    numbers = [int(number.replace(",", "")) for number in told.groups()]
    for elements, workers in (numbers[:2], numbers[2:]):
        fewer = [modes.pays((elements + more,), workers, Encoding.block_size) for more in (-64, -1, 0, 1, 64)]
        assert fewer == [False, False, True, True, True], f"README: {elements:,} elements on {workers:,} workers"
