"""`hvd8bit doctor`: what is installed, how it was built, who can reach this host, and what is wrong.

Facts are gathered first, TensorFlow's and Horovod's each in a process of its own: a broken installation may
raise, print or crash there without taking the doctor along. `judge` then turns facts into findings.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import dataclasses
import importlib.metadata
import json
import os
import pathlib
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from hvd8bit import native
from hvd8bit.bench.machine import machine, versions

OK, NOTE, WARNING, FAULT = "ok", "note", "warning", "fault"
KNOWN_BACKENDS = {"scalar": "scalar", "avx2": "AVX2", "avx512": "AVX-512", "cuda": "CUDA"}
DECLARED_PYTHONS = ((3, 9), (3, 12))
# Importing TensorFlow takes seconds, on a busy machine with a cold disk a minute; a hang has to end too.
PROBE_TIMEOUT_S = 180

Facts = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Finding:
    """A line of the report. `status` is ok, note, warning or fault; one fault makes the exit status 1."""

    subject: str
    status: str
    found: str
    remedy: str = ""


# ------------------------------------------------------------------------------------------------ gathering


def gather() -> Facts:
    """All facts about this installation and this host, as plain JSON values. Takes seconds."""
    with concurrent.futures.ThreadPoolExecutor(max_workers=2) as pool:
        tensorflow = pool.submit(_probe, "tensorflow")
        horovod = pool.submit(_probe, "horovod")
        return {
            "python": list(sys.version_info[:3]),
            "python_path": sys.executable,
            "distributions": _distributions("tensorflow", "tensorflow-cpu", "horovod", "keras", "tf-keras", "numpy"),
            "library": {"path": str(native.find() or ""), "info": native.build_info()},
            "host": _host_facts(),
            "cuda_driver": _cuda_driver(),
            "tensorflow": tensorflow.result(),
            "horovod": horovod.result(),
        }


def _distributions(*names: str) -> dict[str, str]:
    versions = {}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _probe(name: str) -> Facts:
    """What `_PROBES[name]` returns in a fresh process, or {"error": why it returned nothing}."""
    code = (
        f"import sys; sys.path.insert(0, {str(pathlib.Path(__file__).parents[1])!r}); "
        f"from hvd8bit import doctor; doctor._answer({name!r})"
    )
    # Two probes share the machine, and TensorFlow's log on a machine without a GPU reads like errors.
    env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=PROBE_TIMEOUT_S,
            env=env,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"importing it took more than {PROBE_TIMEOUT_S} s"}
    for line in reversed(done.stdout.splitlines()):
        if line.startswith(_MARK):
            return json.loads(line[len(_MARK) :])
    if done.returncode < 0:
        return {"error": f"importing it ended the process with signal {-done.returncode}"}
    return {"error": (done.stderr.strip().splitlines() or ["it gave no answer"])[-1]}


_MARK = "hvd8bit-doctor:"


def _answer(name: str) -> None:
    """Runs in the probe's process: prints the facts, or the error that importing raised."""
    try:
        facts = _PROBES[name]()
    except Exception as error:  # whatever a broken installation raises is what we came for
        missing = isinstance(error, ModuleNotFoundError) and error.name == name
        facts = {"error": f"{type(error).__name__}: {error}".splitlines()[0], "missing": missing}
    print("\n" + _MARK + json.dumps(facts), flush=True)


def _probe_tensorflow() -> Facts:
    import tensorflow as tf

    build = dict(tf.sysconfig.get_build_info())
    facts: Facts = {
        "version": tf.__version__,
        "keras": str(getattr(tf.keras, "__version__", "")),
        "cxx_abi": tf.sysconfig.CXX11_ABI_FLAG,
        "cuda_version": build.get("cuda_version", "") if build.get("is_cuda_build") else "",
        "gpus": len(tf.config.list_physical_devices("GPU")),
        "gpu_capabilities": _gpu_capabilities(tf),
        "library_error": "",
        "backends": [],
    }
    try:
        native.load()
        facts["backends"] = native.backends()
    except Exception as error:
        facts["library_error"] = str(error)
    return facts


def _gpu_capabilities(tf) -> list[str]:
    """Compute capabilities of the GPUs that TensorFlow sees, e.g. ["90"]."""
    found = set()
    for gpu in tf.config.list_physical_devices("GPU"):
        capability = tf.config.experimental.get_device_details(gpu).get("compute_capability")
        if capability:
            found.add("".join(map(str, capability)))
    return sorted(found, key=int)


def _probe_horovod() -> Facts:
    import horovod
    import horovod.tensorflow as hvd

    metadata = pathlib.Path(horovod.__file__).with_name("metadata.json")
    return {
        "version": horovod.__version__,
        "built_for": json.loads(metadata.read_text()).get("tensorflow", "") if metadata.exists() else "",
        "gloo": bool(hvd.gloo_built()),
        "mpi": bool(hvd.mpi_built()),
        "nccl": bool(hvd.nccl_built()),
    }


_PROBES = {"tensorflow": _probe_tensorflow, "horovod": _probe_horovod}


def _host_facts() -> Facts:
    """How this host's name resolves, as Gloo asks: by gethostname() and the resolver."""
    name = socket.gethostname()
    try:
        addresses = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None, socket.AF_INET)})
    except OSError:
        addresses = []
    return {
        "name": name,
        "addresses": addresses,
        "own": [address for address in addresses if _is_own(address)],
        "outgoing": _outgoing_address(),
    }


def _is_own(address: str) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def _outgoing_address() -> str:
    """The address that packets to other hosts leave from, or "". Connecting a UDP socket sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # a documentation address (RFC 5737): any that is not local will do
            return str(probe.getsockname()[0])
        except OSError:
            return ""


def _cuda_driver() -> int:
    """The newest CUDA that the driver runs, as 1000 * major + 10 * minor; 0 without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    version = ctypes.c_int(0)
    return version.value if driver.cuDriverGetVersion(ctypes.byref(version)) == 0 else 0


# ------------------------------------------------------------------------------------------------ judging


def judge(facts: Facts, *, multi_host: bool = False) -> list[Finding]:
    """What the facts mean. `multi_host`: the job spans hosts, so an unreachable host name is a fault."""
    return [
        _judge_python(facts),
        *_judge_tensorflow(facts),
        *_judge_keras(facts),
        *_judge_horovod(facts),
        *_judge_library(facts),
        _judge_host(facts["host"], multi_host),
        _judge_cuda(facts),
    ]


def _judge_python(facts: Facts) -> Finding:
    version = facts["python"]
    low, high = DECLARED_PYTHONS
    found = f"{'.'.join(map(str, version))} ({facts['python_path']})"
    if low <= tuple(version[:2]) <= high:
        return Finding("Python", OK, found)
    wanted = f"{low[0]}.{low[1]} to {high[0]}.{high[1]}"
    return Finding("Python", WARNING, found, f"hvd8bit is made for Python {wanted}: use one of those")


def _judge_tensorflow(facts: Facts) -> list[Finding]:
    tensorflow, distributions = facts["tensorflow"], facts["distributions"]
    installed = [name for name in ("tensorflow", "tensorflow-cpu") if name in distributions]
    if "error" in tensorflow:
        if tensorflow.get("missing"):
            return [
                Finding(
                    "TensorFlow",
                    FAULT,
                    "not installed",
                    "run make setup, or pip install tensorflow-cpu==2.18.1",
                )
            ]
        remedy = f"reinstall it: pip install --force-reinstall --no-deps {' '.join(installed) or 'tensorflow-cpu'}"
        return [Finding("TensorFlow", FAULT, f"does not import: {tensorflow['error']}", remedy)]
    found = tensorflow["version"] + (f" ({installed[0]})" if len(installed) == 1 else "")
    findings = [Finding("TensorFlow", OK, found)]
    if len(installed) > 1:
        named = " and ".join(f"{name} {distributions[name]}" for name in installed)
        findings.append(
            Finding(
                "TensorFlow",
                WARNING,
                f"{named} are both installed, and write the same files",
                f"pip uninstall {' '.join(installed)}, then install the one you want",
            )
        )
    return findings


def _judge_keras(facts: Facts) -> list[Finding]:
    version = facts["tensorflow"].get("keras") or facts["distributions"].get("keras", "")
    findings = []
    if version.startswith("3"):
        findings.append(
            Finding(
                "Keras",
                NOTE,
                f"{version}: Horovod's own Keras DistributedOptimizer reduces nothing with Keras 3, without "
                "an error: every worker trains alone",
                "use hvd8bit.keras.DistributedOptimizer",
            )
        )
    elif version:
        findings.append(Finding("Keras", OK, version))
    if "tf-keras" in facts["distributions"]:
        findings.append(Finding("tf_keras", OK, facts["distributions"]["tf-keras"]))
    return findings


def _judge_horovod(facts: Facts) -> list[Finding]:
    horovod, tensorflow = facts["horovod"], facts["tensorflow"]
    rebuild = (
        "build it against this TensorFlow: make setup, or HOROVOD_WITH_TENSORFLOW=1 HOROVOD_WITH_GLOO=1 "
        "pip install --no-build-isolation --no-cache-dir --force-reinstall --no-deps horovod==0.28.1"
    )
    if horovod.get("missing"):
        return [Finding("Horovod", FAULT, "not installed", rebuild.replace(" --force-reinstall", ""))]
    if "error" in horovod:
        if "error" in tensorflow:
            # It needs TensorFlow to import; whether it is sound cannot be told before that is.
            version = facts["distributions"].get("horovod")
            found = f"{version} installed, cannot be checked without TensorFlow" if version else "not installed"
            return [Finding("Horovod", WARNING if version else FAULT, found, "mend TensorFlow first")]
        return [Finding("Horovod", FAULT, f"does not import: {horovod['error']}", rebuild)]
    found, built_for = horovod["version"], horovod["built_for"]
    if built_for and "version" in tensorflow and _minor(built_for) != _minor(tensorflow["version"]):
        wrong = f"{found}, built for TensorFlow {built_for}, but TensorFlow {tensorflow['version']} is installed"
        return [Finding("Horovod", FAULT, wrong, rebuild)]
    findings = [Finding("Horovod", OK, found + (f", built for TensorFlow {built_for}" if built_for else ""))]
    transports = {"Gloo": horovod["gloo"], "MPI": horovod["mpi"], "NCCL": horovod["nccl"]}
    built = ", ".join(name for name, there in transports.items() if there) or "none"
    absent = ", ".join(name for name, there in transports.items() if not there)
    text = built + (f" (not built: {absent})" if absent else "")
    if not (horovod["gloo"] or horovod["mpi"]):
        findings.append(Finding("Transports", FAULT, text, "Horovod needs Gloo or MPI: " + rebuild))
    elif tensorflow.get("gpus") and not horovod["nccl"]:
        findings.append(
            Finding(
                "Transports",
                WARNING,
                f"{text}; without NCCL the tensors of {tensorflow['gpus']} GPUs go through the host's memory",
                "HOROVOD_GPU_OPERATIONS=NCCL make setup",
            )
        )
    else:
        findings.append(Finding("Transports", OK, text))
    return findings


def _judge_library(facts: Facts) -> list[Finding]:
    path, info = facts["library"]["path"], facts["library"]["info"]
    tensorflow = facts["tensorflow"]
    if not path:
        remedy = "run make setup in a checkout, or pip install --no-build-isolation ."
        return [Finding("Op library", FAULT, "not built", remedy)]
    built_for = info.get("tensorflow_version", "an unknown version")
    if "version" in tensorflow:
        wrong = native.mismatch(tensorflow["version"], info) or tensorflow["library_error"]
        if wrong:
            what, _, remedy = wrong.partition("; ")
            return [Finding("Op library", FAULT, what, remedy or "rebuild it with make setup")]
    checked = "" if "version" in tensorflow else "; not loaded, for want of TensorFlow"
    found = f"built for TensorFlow {built_for} with {info.get('compiler', 'an unknown compiler')}{checked}"
    there = tensorflow.get("backends") or info.get("backends", [])
    architectures = info.get("cuda_architectures", [])
    if architectures and "cuda" not in there:
        there = [*there, "cuda"]
    names = [text + _for_architectures(name, architectures) for name, text in KNOWN_BACKENDS.items() if name in there]
    absent = [text for name, text in KNOWN_BACKENDS.items() if name not in there]
    backends = ", ".join(names) + (f" (not built: {', '.join(absent)})" if absent else "")
    return [
        Finding("Op library", OK if "version" in tensorflow else NOTE, found),
        Finding("Back ends", OK, backends),
    ]


def _for_architectures(backend: str, architectures: Sequence[str]) -> str:
    return f" for {', '.join(architectures)}" if backend == "cuda" and architectures else ""


def _judge_host(host: Facts, multi_host: bool) -> Finding:
    name, addresses = host["name"], host["addresses"]
    loopback = [address for address in addresses if address.startswith("127.")]
    foreign = [address for address in addresses if address not in host["own"]]
    if addresses and not loopback and not foreign:
        return Finding("Host name", OK, f"{name} resolves to {', '.join(addresses)}")
    if not addresses:
        wrong = f"{name} resolves to no address"
    elif loopback:
        wrong = f"{name} resolves to {', '.join(loopback)}, which other hosts cannot reach"
    else:
        wrong = f"{name} resolves to {', '.join(foreign)}, which is no address of this host"
    outgoing = host["outgoing"]
    address = outgoing if outgoing and not outgoing.startswith("127.") else "ADDRESS"
    remedy = f"for jobs on several hosts map {name} to an address they reach, in /etc/hosts: {address} {name}"
    return Finding("Host name", FAULT if multi_host else WARNING, wrong, remedy)


def _judge_cuda(facts: Facts) -> Finding:
    driver, runtime = facts["cuda_driver"], facts["tensorflow"].get("cuda_version", "")
    gpus = facts["tensorflow"].get("gpus", 0)
    ours = facts["library"]["info"].get("cuda_architectures", [])
    ours_made_with = facts["library"]["info"].get("cuda_version", "")
    made_for = f"TensorFlow's runtime is {runtime}" if runtime else "TensorFlow is built without CUDA"
    if not driver:
        return Finding("CUDA", NOTE, f"no NVIDIA driver, so the CPU does the work; {made_for}")
    text = f"the driver runs CUDA {driver // 1000}.{driver % 1000 // 10}; {made_for}; {gpus} GPUs in TensorFlow"
    if runtime and driver // 1000 < int(runtime.split(".")[0]):
        return Finding(
            "CUDA", FAULT, text, f"update the NVIDIA driver to one for CUDA {runtime.split('.')[0]} or newer"
        )
    if runtime and not gpus:
        return Finding(
            "CUDA", WARNING, text, "pip install 'tensorflow[and-cuda]' brings the libraries TensorFlow lacks"
        )
    if gpus and not ours:
        return Finding(
            "CUDA",
            NOTE,
            text + "; hvd8bit's op library has no CUDA kernels: gradients are coded on the CPU",
            "install a CUDA toolkit with nvcc, or set NVCC, and build again: make setup",
        )
    if not ours:
        return Finding("CUDA", OK, text)
    text += f"; hvd8bit's kernels were built with CUDA {ours_made_with or 'of an unknown version'}"
    if ours_made_with and driver // 1000 < int(ours_made_with.split(".")[0]):
        remedy = f"update the driver, or build with nvcc of CUDA {driver // 1000}: NVCC=... make setup"
        return Finding("CUDA", FAULT, text, remedy)
    foreign = [name for name in facts["tensorflow"].get("gpu_capabilities", []) if not _runs_on(name, ours)]
    if foreign:
        return Finding(
            "CUDA",
            FAULT,
            f"{text}, for {', '.join(ours)}: none of them runs on this machine's sm_{', sm_'.join(foreign)}",
            f"build for it: HVD8BIT_CUDA_ARCHS={','.join(foreign)} make setup",
        )
    return Finding("CUDA", OK, text)


def _runs_on(capability: str, architectures: Sequence[str]) -> bool:
    """Whether kernels built for `architectures` run on a GPU: built for its generation, or as PTX for an older one."""
    have = divmod(int(capability), 10)
    for name in architectures:
        kind, _, number = name.partition("_")
        made_for = divmod(int(number), 10)
        if made_for <= have and (kind == "compute" or made_for[0] == have[0]):
            return True
    return False


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]


# ------------------------------------------------------------------------------------------------ reporting


def report(facts: Facts, findings: Sequence[Finding]) -> dict[str, Any]:
    """The JSON form: the findings under `results`, beside `machine` and `versions`."""
    return {
        "machine": {"host": facts["host"]["name"], **machine()},
        "versions": versions(),
        "op_library": {"path": facts["library"]["path"], **facts["library"]["info"]},
        "results": [dataclasses.asdict(finding) for finding in findings],
    }


def show(findings: Sequence[Finding], *, to_stderr: bool = False) -> None:
    """Prints the findings as a table, faults and warnings with what mends them."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        # Another Python than the one that has hvd8bit's requirements: that is what the findings say, too.
        for finding in findings:
            remedy = f" -> {finding.remedy}" if finding.remedy else ""
            print(
                f"{finding.subject}: {finding.status}: {finding.found}{remedy}", file=sys.stderr if to_stderr else None
            )
        return

    styles = {OK: "green", NOTE: "cyan", WARNING: "yellow", FAULT: "bold red"}
    table = Table(show_edge=False, pad_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("status", no_wrap=True)
    table.add_column("found, and what mends it", overflow="fold")
    for finding in findings:
        text = finding.found + (f"\n-> {finding.remedy}" if finding.remedy else "")
        style = styles[finding.status]
        table.add_row(finding.subject, f"[{style}]{finding.status}[/{style}]", _plain(text))
    # Piped, the report is read by programs and by grep: no colours, no lines broken at 80 columns.
    console = Console(stderr=to_stderr)
    if not console.is_terminal:
        console = Console(stderr=to_stderr, width=1000)
    console.print(table)
    faults = sum(finding.status == FAULT for finding in findings)
    warnings = sum(finding.status == WARNING for finding in findings)
    console.print(f"\nfaults: {faults}, warnings: {warnings}")


def _plain(text: str) -> Any:
    """`text` as rich shows it unchanged: square brackets are no markup here."""
    from rich.text import Text

    return Text(text)
