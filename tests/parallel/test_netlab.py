"""The hosts that the tests of several hosts run on."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hvd8bit.bench import namespaces, netlab

MISSING = netlab.available(shaping=True)
needs_lab = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
needs_ssh = pytest.mark.skipif(netlab.available(ssh=True) is not None, reason=str(netlab.available(ssh=True)))

SEND = """
import socket, sys, time
connection = socket.create_connection((sys.argv[1], 5000))
started = time.monotonic()
connection.sendall(bytes(int(sys.argv[2])))
connection.shutdown(socket.SHUT_WR)
connection.recv(1)
print(time.monotonic() - started)
"""
RECEIVE = """
import socket
server = socket.create_server(("", 5000))
print("ready", flush=True)
connection, _ = server.accept()
while connection.recv(1 << 20):
    pass
connection.sendall(b"!")
"""


def _send(lab: netlab.NetLab, sender: netlab.Host, receiver: netlab.Host, size: int) -> float:
    """Sends `size` bytes from host to host by TCP; returns the seconds it took."""
    with lab.popen(receiver, [sys.executable, "-c", RECEIVE], stdout=subprocess.PIPE) as server:
        assert server.stdout.readline() == b"ready\n"
        command = [sys.executable, "-c", SEND, receiver.name, str(size)]
        with lab.popen(sender, command, stdout=subprocess.PIPE) as client:
            return float(client.stdout.read())


def _ask(lab: netlab.NetLab, host: netlab.Host, program: str) -> str:
    with lab.popen(host, [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        return process.stdout.read().strip()


def _traces(pid: int) -> list[str]:
    """What is there of the labs that a process made."""
    folders = [Path("/run/netns"), namespaces.FILES]
    return [path.name for folder in folders if folder.is_dir() for path in folder.glob(f"hvd8bit.{pid}.*")]


@needs_lab
def test_a_host_resolves_its_own_name_to_the_address_others_reach():
    with netlab.NetLab(hosts=2) as lab:
        own = "import socket; print(socket.gethostbyname(socket.gethostname()))"
        assert [_ask(lab, host, own) for host in lab.hosts] == [host.address for host in lab.hosts]
        other = "import socket; print(socket.gethostbyname('h1'))"
        assert _ask(lab, lab.hosts[0], other) == lab.hosts[1].address


@needs_lab
def test_the_interface_counts_what_is_sent():
    size = 10_000_000
    with netlab.NetLab(hosts=3) as lab:
        before = lab.traffic()
        _send(lab, lab.hosts[0], lab.hosts[1], size)
        sender, receiver, third = (now - then for now, then in zip(lab.traffic(), before))
    # Headers and acknowledgements: 66 bytes for each frame, which are of 1.5 to 64 KB here.
    assert size < sender.sent_bytes < 1.06 * size
    assert size < receiver.received_bytes < 1.06 * size
    assert receiver.sent_bytes < 0.05 * size
    assert third.sent_bytes < 10_000


@needs_lab
def test_a_process_reads_the_counters_of_its_own_host():
    program = "from hvd8bit.bench import netlab; print(netlab.own_traffic().sent_bytes)"
    with netlab.NetLab(hosts=2) as lab:
        _send(lab, lab.hosts[1], lab.hosts[0], 1_000_000)
        assert int(_ask(lab, lab.hosts[1], program)) > 1_000_000
        assert int(_ask(lab, lab.hosts[0], program)) < 500_000


@needs_lab
def test_a_rate_limits_what_a_host_sends():
    rate_bit_per_s, size = 50e6, 5_000_000
    with netlab.NetLab(hosts=2, rate_bit_per_s=rate_bit_per_s) as lab:
        seconds = _send(lab, lab.hosts[0], lab.hosts[1], size)
    # Both ends let one burst pass at once.
    assert seconds > 8 * (size - 2 * netlab.MIN_BURST_BYTES) / rate_bit_per_s
    assert seconds < 4 * 8 * size / rate_bit_per_s


@needs_lab
def test_labs_do_not_see_each_other():
    with netlab.NetLab(hosts=2) as one, netlab.NetLab(hosts=2) as other:
        assert [host.address for host in one.hosts] == [host.address for host in other.hosts]
        _send(one, one.hosts[0], one.hosts[1], 1_000_000)
        assert one.traffic()[0].sent_bytes > 1_000_000
        assert other.traffic()[1].received_bytes < 10_000


@needs_lab
@pytest.mark.parametrize("rate", [*netlab.RATES_BIT_PER_S, 400e9])
def test_rates_at_the_borders_can_be_set_up(rate):
    with netlab.NetLab(hosts=1, rate_bit_per_s=rate):
        pass


@needs_lab
def test_an_exception_leaves_nothing_behind():
    started = []

    def break_off():
        with netlab.NetLab(hosts=2) as lab:
            started.append(lab.popen(lab.hosts[1], ["sleep", "1000"]))
            assert _traces(os.getpid())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        break_off()
    assert not _traces(os.getpid())
    assert started[0].wait(timeout=5) == -signal.SIGKILL


HOLD = """
from hvd8bit.bench import netlab
with netlab.NetLab(hosts=2) as lab:
    lab.run(["sh", "-c", "echo $$; exec sleep 1000"], show_rank_0=True)
"""


@pytest.fixture
def holder(tmp_path):
    """A process that holds a lab, in which `sleep` runs; `tmp_path` is for its temporary files."""
    command = [sys.executable, "-c", HOLD]
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        process.sleeper = int(process.stdout.readline())
        yield process
        process.kill()


def _alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and whose parent has not noticed does not."""
    stat = Path("/proc", str(pid), "stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


@needs_lab
def test_sigterm_leaves_nothing_behind(holder):
    assert _traces(holder.pid)
    holder.terminate()
    assert holder.wait(timeout=10) == 128 + signal.SIGTERM
    assert not _traces(holder.pid)
    assert not _alive(holder.sleeper)


@needs_lab
def test_the_next_lab_removes_what_a_killed_process_left(holder, tmp_path):
    with netlab.NetLab(hosts=1):
        assert _traces(holder.pid)  # it lives: hands off
    holder.kill()
    holder.wait()
    assert _traces(holder.pid)
    assert _alive(holder.sleeper)
    with netlab.NetLab(hosts=1):
        pass
    assert not _traces(holder.pid)
    assert not _alive(holder.sleeper)
    assert not list(tmp_path.iterdir())


@needs_lab
def test_run_gives_each_worker_its_place():
    program = """import os
names = ["RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "HOSTNAME"]
print(*(os.environ["HOROVOD_" + name] for name in names))"""
    with netlab.NetLab(hosts=2) as lab:
        job = lab.run([sys.executable, "-c", program], slots=2)
    assert job.returncode == 0, job.describe()
    assert [text.strip() for text in job.stdout] == [
        "0 4 0 2 0 2 h0",
        "1 4 1 2 0 2 h0",
        "2 4 0 2 1 2 h1",
        "3 4 1 2 1 2 h1",
    ]


@needs_lab
def test_run_ends_when_a_worker_fails():
    program = "import os, sys, time\nif os.environ['HOROVOD_RANK'] == '1': sys.exit('broken')\ntime.sleep(1000)"
    with netlab.NetLab(hosts=2) as lab:
        started = time.monotonic()
        job = lab.run([sys.executable, "-c", program])
    assert time.monotonic() - started < 15
    assert job.returncode != 0
    assert "broken" in job.stderr[1]
    assert "broken" in job.describe()


@needs_lab
def test_run_ends_after_its_timeout():
    with netlab.NetLab(hosts=2) as lab:
        job = lab.run(["sleep", "1000"], timeout=1)
        assert job.returncode != 0
        assert job.problem == "not finished after 1 s; ended"
        assert not any(namespaces.pids(host.namespace) for host in lab.hosts)


@needs_ssh
def test_hosts_reach_each_other_by_ssh_alone_with_the_labs_own_keys():
    with netlab.NetLab(hosts=2) as lab:
        lab._start_sshd()
        with lab.popen(lab.hosts[0], ["ssh", "h1", "cat /etc/hosts"], stdout=subprocess.PIPE, text=True) as ssh:
            assert f"{lab.hosts[1].address} {os.uname().nodename}" in ssh.stdout.read()
        assert ssh.returncode == 0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"hosts": 0}, r"hosts must be in \[1, 250\], got 0"),
        (
            {"hosts": 2, "rate_bit_per_s": 0},
            r"rate_bit_per_s must be in \[4000, 10000000000000\], or None for no limit, got 0",
        ),
        ({"hosts": 2, "rate_bit_per_s": 3999}, "got 3999"),
        ({"hosts": 2, "rate_bit_per_s": 11e12}, r"got 1.1e\+13"),
        ({"hosts": 2, "rate_bit_per_s": math.nan}, "got nan"),
    ],
)
def test_wrong_arguments_are_named(arguments, text):
    with pytest.raises(ValueError, match=text):
        netlab.NetLab(**arguments)


def test_available_tells_why_not(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert netlab.available.__wrapped__() == "network namespaces need root"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "")
    assert netlab.available.__wrapped__() == "the command ip is missing (apt-get install iproute2)"


@needs_lab
def test_available_tells_what_the_system_refused(monkeypatch):
    monkeypatch.setattr(netlab, "INTERFACE", "a name that is too long for Linux")
    assert "a namespace cannot be set up here: ip -n" in netlab.available.__wrapped__()
    assert not _traces(os.getpid())


def test_importing_it_loads_no_tensorflow_and_no_horovod():
    program = "import sys, hvd8bit.bench.netlab; print({'tensorflow', 'horovod'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == "set()"
