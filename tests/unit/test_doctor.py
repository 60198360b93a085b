"""The doctor: what it says about facts, and that it survives installations that are missing or broken."""

from __future__ import annotations

import copy
import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

import hvd8bit
from hvd8bit import doctor, native

SOUND = {
    "python": [3, 11, 2],
    "python_path": "/venv/bin/python",
    "distributions": {
        "tensorflow-cpu": "2.18.1",
        "horovod": "0.28.1",
        "keras": "3.15.1",
        "tf-keras": "2.18.0",
    },
    "library": {
        "path": "/venv/hvd8bit/_hvd8bit_ops.so",
        "info": {"tensorflow_version": "2.18.1", "compiler": "g++ 12", "backends": ["scalar"]},
    },
    "host": {"name": "a", "addresses": ["10.0.0.1"], "own": ["10.0.0.1"], "outgoing": "10.0.0.1"},
    "cuda_driver": 0,
    "tensorflow": {
        "version": "2.18.1",
        "keras": "3.15.1",
        "cxx_abi": 1,
        "cuda_version": "12.5.1",
        "gpus": 0,
        "library_error": "",
        "backends": ["scalar"],
    },
    "horovod": {"version": "0.28.1", "built_for": "2.18.1", "gloo": True, "mpi": False, "nccl": False},
}


def facts_with(changes: dict) -> dict:
    """SOUND with `changes`, whose keys are paths such as "host.addresses"."""
    facts = copy.deepcopy(SOUND)
    for path, value in changes.items():
        *parents, last = path.split(".")
        place = facts
        for parent in parents:
            place = place[parent]
        place[last] = value
    return facts


@pytest.fixture
def library_is_there(monkeypatch):
    """`judge` has native look for the library file; here it is there, whatever has been built."""
    monkeypatch.setattr(native, "find", lambda: pathlib.Path(SOUND["library"]["path"]))


def findings(changes: dict, **options) -> dict[str, doctor.Finding]:
    """By subject; of two findings about one subject the worse."""
    order = [doctor.OK, doctor.NOTE, doctor.WARNING, doctor.FAULT]
    found: dict[str, doctor.Finding] = {}
    for finding in doctor.judge(facts_with(changes), **options):
        known = found.get(finding.subject)
        if known is None or order.index(finding.status) > order.index(known.status):
            found[finding.subject] = finding
    return found


@pytest.mark.usefixtures("library_is_there")
def test_sound_installation_has_no_fault_and_no_warning():
    statuses = {finding.status for finding in findings({}).values()}
    assert statuses <= {doctor.OK, doctor.NOTE}


WITH_GPU = {
    "tensorflow.gpus": 1,
    "tensorflow.gpu_capabilities": ["86"],
    "library.info.cuda_architectures": ["sm_80", "sm_90", "compute_90"],
    "library.info.cuda_version": "13.0",
    "horovod.nccl": True,
}

# subject, status, what the facts differ in, words of the finding, words of the remedy
CASES = {
    "python too new": ("Python", doctor.WARNING, {"python": [3, 13, 0]}, "3.13.0", "3.9 to 3.12"),
    "no TensorFlow": (
        "TensorFlow",
        doctor.FAULT,
        {"tensorflow": {"error": "ModuleNotFoundError: No module named 'tensorflow'", "missing": True}},
        "not installed",
        "make setup",
    ),
    "broken TensorFlow": (
        "TensorFlow",
        doctor.FAULT,
        {"tensorflow": {"error": "ImportError: libfoo.so.1", "missing": False}},
        "libfoo.so.1",
        "--force-reinstall --no-deps tensorflow-cpu",
    ),
    "two TensorFlows": (
        "TensorFlow",
        doctor.WARNING,
        {"distributions.tensorflow": "2.17.1"},
        "tensorflow 2.17.1 and tensorflow-cpu 2.18.1",
        "pip uninstall tensorflow tensorflow-cpu",
    ),
    "Keras 3": (
        "Keras",
        doctor.NOTE,
        {},
        "reduces nothing with Keras 3",
        "hvd8bit.keras.DistributedOptimizer",
    ),
    "Keras 2": ("Keras", doctor.OK, {"tensorflow.keras": "2.15.0"}, "2.15.0", ""),
    "no Horovod": (
        "Horovod",
        doctor.FAULT,
        {"horovod": {"error": "ModuleNotFoundError: No module named 'horovod'", "missing": True}},
        "not installed",
        "--no-build-isolation --no-cache-dir",
    ),
    "broken Horovod": (
        "Horovod",
        doctor.FAULT,
        {"horovod": {"error": "NotFoundError: undefined symbol: _ZN10tensorflow", "missing": False}},
        "undefined symbol",
        "--force-reinstall",
    ),
    "Horovod of another TensorFlow": (
        "Horovod",
        doctor.FAULT,
        {"horovod.built_for": "2.15.1"},
        "built for TensorFlow 2.15.1, but TensorFlow 2.18.1 is installed",
        "make setup",
    ),
    "Horovod without a transport": (
        "Transports",
        doctor.FAULT,
        {"horovod.gloo": False},
        "none",
        "Gloo or MPI",
    ),
    "transports": (
        "Transports",
        doctor.OK,
        {"horovod.mpi": True},
        "Gloo, MPI (not built: NCCL)",
        "",
    ),
    "GPUs without NCCL": (
        "Transports",
        doctor.WARNING,
        {"tensorflow.gpus": 2},
        "2 GPUs",
        "HOROVOD_GPU_OPERATIONS=NCCL",
    ),
    "library not built": ("Op library", doctor.FAULT, {"library.path": ""}, "not built", "make setup"),
    "library of another TensorFlow": (
        "Op library",
        doctor.FAULT,
        {"library.info.tensorflow_version": "2.15.1"},
        "built for TensorFlow 2.15.1, but TensorFlow 2.18.1",
        "make setup",
    ),
    "library of the same minor version": (
        "Op library",
        doctor.OK,
        {"library.info.tensorflow_version": "2.18.0"},
        "2.18.0",
        "",
    ),
    "library that does not load": (
        "Op library",
        doctor.FAULT,
        {"tensorflow.library_error": "the loader says: undefined symbol"},
        "undefined symbol",
        "make setup",
    ),
    "back ends": ("Back ends", doctor.OK, {}, "scalar (not built: AVX2, AVX-512, CUDA)", ""),
    "CUDA back end": (
        "Back ends",
        doctor.OK,
        {"library.info.cuda_architectures": ["sm_80", "sm_90"]},
        "CUDA for sm_80, sm_90 (not built: AVX2, AVX-512)",
        "",
    ),
    "no CUDA kernels on a machine with GPUs": (
        "CUDA",
        doctor.NOTE,
        {"cuda_driver": 12080, "tensorflow.gpus": 1},
        "gradients are coded on the CPU",
        "NVCC",
    ),
    "CUDA kernels": (
        "CUDA",
        doctor.OK,
        {**WITH_GPU, "cuda_driver": 13000},
        "hvd8bit's kernels were built with CUDA 13.0",
        "",
    ),
    "a driver older than the CUDA kernels": (
        "CUDA",
        doctor.FAULT,
        {**WITH_GPU, "cuda_driver": 12080},
        "the driver runs CUDA 12.8",
        "build with nvcc of CUDA 12",
    ),
    "a GPU that the CUDA kernels were not built for": (
        "CUDA",
        doctor.FAULT,
        {**WITH_GPU, "cuda_driver": 13000, "tensorflow.gpu_capabilities": ["75"]},
        "for sm_80, sm_90, compute_90: none of them runs on this machine's sm_75",
        "HVD8BIT_CUDA_ARCHS=75 make setup",
    ),
    "host name on loopback": (
        "Host name",
        doctor.WARNING,
        {"host.addresses": ["127.0.1.1"], "host.own": ["127.0.1.1"]},
        "a resolves to 127.0.1.1, which other hosts cannot reach",
        "10.0.0.1 a",
    ),
    "host name of another host": (
        "Host name",
        doctor.WARNING,
        {"host.own": []},
        "10.0.0.1, which is no address of this host",
        "/etc/hosts",
    ),
    "host name unknown": (
        "Host name",
        doctor.WARNING,
        {"host.addresses": [], "host.own": [], "host.outgoing": ""},
        "a resolves to no address",
        "ADDRESS a",
    ),
    "no driver": ("CUDA", doctor.NOTE, {}, "no NVIDIA driver", ""),
    "driver too old": (
        "CUDA",
        doctor.FAULT,
        {"cuda_driver": 11080, "tensorflow.gpus": 1},
        "the driver runs CUDA 11.8; TensorFlow's runtime is 12.5.1",
        "update the NVIDIA driver to one for CUDA 12",
    ),
    "driver but no GPU in TensorFlow": (
        "CUDA",
        doctor.WARNING,
        {"cuda_driver": 12080},
        "0 GPUs",
        "tensorflow[and-cuda]",
    ),
    "GPUs without our kernels": (
        "CUDA",
        doctor.NOTE,
        {"cuda_driver": 12080, "tensorflow.gpus": 1},
        "no CUDA kernels",
        "",
    ),
    "GPUs with our kernels": (
        "CUDA",
        doctor.OK,
        {"cuda_driver": 13000, "tensorflow.gpus": 1, "library.info.cuda_architectures": ["sm_90"]},
        "CUDA 13.0",
        "",
    ),
}


@pytest.mark.usefixtures("library_is_there")
@pytest.mark.parametrize("case", CASES)
def test_finding(case):
    subject, status, changes, found, remedy = CASES[case]
    finding = findings(changes)[subject]
    assert finding.status == status, finding
    assert found in finding.found
    assert remedy in finding.remedy
    if status in (doctor.WARNING, doctor.FAULT):
        assert finding.remedy, "a warning or fault says what mends it"


@pytest.mark.usefixtures("library_is_there")
@pytest.mark.parametrize("case", ["host name on loopback", "host name of another host", "host name unknown"])
def test_unreachable_host_name_is_a_fault_for_several_hosts(case):
    _, _, changes, found, _ = CASES[case]
    finding = findings(changes, multi_host=True)["Host name"]
    assert finding.status == doctor.FAULT
    assert found in finding.found


@pytest.mark.usefixtures("library_is_there")
def test_without_tensorflow_horovod_is_not_blamed():
    changes = {
        "tensorflow": {"error": "ImportError: no", "missing": True},
        "horovod": {"error": "ImportError: no", "missing": False},
    }
    assert findings(changes)["Horovod"].status == doctor.WARNING


@pytest.mark.parametrize(
    ("capability", "runs"),
    [("80", True), ("86", True), ("89", True), ("75", False), ("90", True), ("100", True), ("120", True)],
)
def test_which_gpus_the_kernels_run_on(capability, runs):
    """Binaries within a generation, upwards; PTX on anything newer."""
    assert doctor._runs_on(capability, ["sm_80", "sm_90", "compute_90"]) is runs


def test_binaries_do_not_run_on_another_generation():
    assert not doctor._runs_on("90", ["sm_80", "sm_86"])
    assert not doctor._runs_on("100", ["sm_90"])


# ------------------------------------------------------------------------------------------------ for real


def run_doctor(package_parent: pathlib.Path, tmp_path: pathlib.Path, **shims: str):
    """Runs `python -m hvd8bit doctor` on the package in `package_parent`.

    `shims` are modules, name and text, that come before the installed ones. Returns exit status, output, and
    findings by subject.
    """
    shim_dir = tmp_path / "shims"
    shim_dir.mkdir()
    for name, text in shims.items():
        (shim_dir / f"{name}.py").write_text(text)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(shim_dir), str(package_parent)])}
    done = subprocess.run(
        [sys.executable, "-m", "hvd8bit", "doctor", "--json", str(tmp_path / "doctor.json")],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert (tmp_path / "doctor.json").exists(), done.stdout + done.stderr
    results = json.loads((tmp_path / "doctor.json").read_text())["results"]
    return done.returncode, done.stdout, {result["subject"]: result for result in results}


PACKAGE = pathlib.Path(hvd8bit.__file__).parent


def test_tensorflow_and_horovod_missing(tmp_path):
    # What Python raises for a module that is not there.
    absent = "raise ModuleNotFoundError(f'No module named {__name__!r}', name=__name__)"
    status, output, found = run_doctor(PACKAGE.parent, tmp_path, tensorflow=absent, horovod=absent)
    assert status == 1
    assert found["TensorFlow"]["status"] == "fault"
    assert found["TensorFlow"]["found"] == "not installed"
    assert found["Horovod"]["status"] == "fault"
    assert found["Horovod"]["found"] == "not installed"
    assert "horovod==0.28.1" in output


def test_broken_horovod_and_library_of_another_tensorflow(tmp_path):
    if native.find() is None:
        pytest.skip("the op library is not built")
    copied = tmp_path / "copy" / "hvd8bit"
    shutil.copytree(PACKAGE, copied, ignore=shutil.ignore_patterns("__pycache__"))
    info = json.loads((copied / "_build_info.json").read_text())
    info["tensorflow_version"] = "2.11.0"
    (copied / "_build_info.json").write_text(json.dumps(info))

    crash = "import os; os.abort()"
    status, output, found = run_doctor(copied.parent, tmp_path, horovod=crash)
    assert status == 1
    assert found["TensorFlow"]["status"] in ("ok", "warning")
    assert found["Op library"]["status"] == "fault"
    assert "built for TensorFlow 2.11.0" in found["Op library"]["found"]
    assert "signal 6" in found["Horovod"]["found"]
    assert "built for TensorFlow 2.11.0" in output


def test_this_installation(tmp_path):
    status, output, found = run_doctor(PACKAGE.parent, tmp_path)
    faults = [result for result in found.values() if result["status"] == "fault"]
    assert (status, faults) == (0, []), output
    assert "scalar" in found["Back ends"]["found"]
    assert "Gloo" in found["Transports"]["found"]


def test_resolver_facts_are_those_of_this_host(monkeypatch):
    monkeypatch.setattr(doctor.socket, "gethostname", lambda: "localhost")
    assert doctor._host_facts()["addresses"] == ["127.0.0.1"]
    assert doctor._host_facts()["own"] == ["127.0.0.1"]
    monkeypatch.setattr(doctor.socket, "gethostname", lambda: "no-such-name.invalid")
    assert doctor._host_facts()["addresses"] == []


def test_a_python_without_rich_gets_plain_lines(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    doctor.show([doctor.Finding("Horovod", doctor.FAULT, "missing", "install it")])
    assert capsys.readouterr().out == "Horovod: fault: missing -> install it\n"
