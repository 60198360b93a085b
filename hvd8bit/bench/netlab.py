"""Several hosts on one machine, to run Horovod jobs on and to count and limit what they send.

Each host is a network namespace with one interface, `eth0`, on a virtual Ethernet cable to a switch (a
bridge) that sits in a namespace of its own. Nothing of a lab is visible outside it, so any number of labs may
exist at a time and all use the same addresses. Linux only, and only as root: ask `available()` first.

    with NetLab(hosts=4, rate_bit_per_s=1e9) as lab:
        job = lab.run([sys.executable, "train.py"])         # one worker per host, no ssh
        job = lab.horovodrun([sys.executable, "train.py"])  # the same by horovodrun -H over ssh
        print(job.stdout[0], lab.traffic())

A lab is taken down when its `with` block ends, by an exception or SIGTERM too; what a killed process left
behind is taken down when the next lab is set up.

What is counted and limited are Ethernet frames as the kernel hands them to the interface: payload, TCP, IP
and Ethernet headers, and acknowledgements. The kernel hands large frames over whole (up to 64 KiB; on a real
card the hardware would cut them), so headers and acknowledgements add far less than the 5 % that frames of
1,500 bytes have. Hosts share the machine's cores.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from hvd8bit.bench import namespaces
from hvd8bit.bench.namespaces import NetLabError

INTERFACE = "eth0"
SUBNET = "10.88.0"
MAX_HOSTS = 250
RATE_VARIABLE = "HVD8BIT_RATE_BIT_PER_S"  # tells workers how fast their link is, where it is limited

SSHD = "/usr/sbin/sshd"

# A frame of up to 64 KiB must fit into the token bucket, else the kernel cuts it up before it is counted.
MIN_BURST_BYTES = 128 * 1024
BURST_SECONDS = 0.002
# tc counts the time of a burst in 2^32 ticks of 64 ns, and bytes of bursts and queues in 32 bits.
RATES_BIT_PER_S = (4e3, 10e12)
MAX_QUEUE_BYTES = 2**32 - 1
# What a port holds back before it drops frames.
MIN_QUEUE_BYTES = 1024 * 1024
QUEUE_SECONDS = 0.1

TERMINATE_SECONDS = 8  # horovodrun gives its workers 5 s between SIGTERM and SIGKILL

_numbers = itertools.count()


@functools.cache
def available(ssh: bool = False, shaping: bool = False) -> str | None:
    """None where labs can be made here, else the reason why not.

    `ssh` asks for `horovodrun` over ssh too, `shaping` for limited rates.
    """
    if sys.platform != "linux":
        return f"network namespaces need Linux, this is {sys.platform}"
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "the command ip is missing (apt-get install iproute2)"
    if shaping and shutil.which("tc") is None:
        return "the command tc is missing (apt-get install iproute2)"
    if ssh and not (os.access(SSHD, os.X_OK) and shutil.which("ssh") and shutil.which("ssh-keygen")):
        return "sshd or ssh is missing (apt-get install openssh-server openssh-client)"
    try:
        with NetLab(hosts=1, rate_bit_per_s=1e9 if shaping else None):
            return None
    except (NetLabError, OSError) as error:
        return f"a namespace cannot be set up here: {error}"


@dataclass(frozen=True)
class Host:
    """One host of a lab."""

    name: str
    address: str
    namespace: str


@dataclass(frozen=True)
class Traffic:
    """What one host has sent and received at its interface since the lab was set up."""

    sent_bytes: int
    received_bytes: int
    sent_frames: int
    received_frames: int

    def __sub__(self, earlier: Traffic) -> Traffic:
        return Traffic(
            self.sent_bytes - earlier.sent_bytes,
            self.received_bytes - earlier.received_bytes,
            self.sent_frames - earlier.sent_frames,
            self.received_frames - earlier.received_frames,
        )


@dataclass(frozen=True)
class Job:
    """A job that has ended: what each rank printed, and how it ended.

    `returncode` is 0 when all ranks ended well. `problem` says why the job was ended from here, or is None.
    """

    returncode: int
    seconds: float
    stdout: tuple[str, ...]
    stderr: tuple[str, ...]
    launcher_output: str = ""
    problem: str | None = None

    def describe(self) -> str:
        """All of it, for a report of a failure."""
        parts = [f"{self.problem or f'exit status {self.returncode}'} after {self.seconds:.1f} s"]
        for rank, (stdout, stderr) in enumerate(zip(self.stdout, self.stderr)):
            parts += [f"--- rank {rank}, standard output ---", stdout.strip()] if stdout.strip() else []
            parts += [f"--- rank {rank}, standard error ---", stderr.strip()] if stderr.strip() else []
        parts += ["--- launcher ---", self.launcher_output.strip()] if self.launcher_output.strip() else []
        return "\n".join(parts)


def own_traffic() -> Traffic:
    """The traffic of the host that the calling process runs on; for use inside a job."""
    folder = Path("/sys/class/net", INTERFACE, "statistics")
    names = ("tx_bytes", "rx_bytes", "tx_packets", "rx_packets")
    return Traffic(*(int((folder / name).read_text()) for name in names))


class NetLab:
    """Hosts h0, h1, ... on one switch.

    Args:
        hosts: how many.
        rate_bit_per_s: what each host can send, and receive, per second, 4 kbit to 10 Tbit; None for no limit. Its
            workers share it.
    """

    def __init__(self, hosts: int, rate_bit_per_s: float | None = None) -> None:
        if not 1 <= hosts <= MAX_HOSTS:
            raise ValueError(f"hosts must be in [1, {MAX_HOSTS}], got {hosts}")
        lowest, highest = RATES_BIT_PER_S
        if rate_bit_per_s is not None and not lowest <= rate_bit_per_s <= highest:
            raise ValueError(
                f"rate_bit_per_s must be in [{lowest:.0f}, {highest:.0f}], or None for no limit, got {rate_bit_per_s:g}"
            )
        self.rate_bit_per_s = rate_bit_per_s
        self._name = f"{namespaces.PREFIX}.{os.getpid()}.{namespaces.started(os.getpid())}.{next(_numbers)}"
        self._switch = f"{self._name}.switch"
        self._jobs = f"{self._name}.jobs"  # no namespace; its files are what jobs write
        self.hosts = tuple(
            Host(f"h{index}", f"{SUBNET}.{index + 1}", f"{self._name}.h{index}") for index in range(hosts)
        )
        self._sshd: list[subprocess.Popen[bytes]] = []
        self._handler: Any = None

    def __enter__(self) -> NetLab:
        _catch_sigterm(self)
        try:
            namespaces.remove_leavings()
            self._set_up()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends everything that runs on the hosts and takes the lab down. May be called again."""
        namespaces.remove([self._jobs, self._switch, *(host.namespace for host in self.hosts)])
        for process in self._sshd:
            process.kill()
            process.wait()
        self._sshd = []
        if self._handler is not None:
            signal.signal(signal.SIGTERM, self._handler)
            self._handler = None

    # Set-up

    def _set_up(self) -> None:
        (namespaces.FILES / self._jobs).mkdir(parents=True)
        namespaces.ip("netns", "add", self._switch)
        namespaces.ip("-n", self._switch, "link", "add", "switch", "type", "bridge")
        namespaces.ip("-n", self._switch, "link", "set", "switch", "up")
        for host in self.hosts:
            self._write_hosts_file(host)
            namespaces.ip("netns", "add", host.namespace)
            cable = ["type", "veth", "peer", "name", INTERFACE, "netns", host.namespace]
            namespaces.ip("-n", self._switch, "link", "add", host.name, *cable)
            namespaces.ip("-n", self._switch, "link", "set", host.name, "master", "switch", "up")
            namespaces.ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", INTERFACE)
            namespaces.ip("-n", host.namespace, "link", "set", INTERFACE, "up")
            namespaces.ip("-n", host.namespace, "link", "set", "lo", "up")
            if self.rate_bit_per_s is not None:
                self._limit(host.namespace, INTERFACE, self.rate_bit_per_s)  # what it sends
                self._limit(self._switch, host.name, self.rate_bit_per_s)  # what it receives

    def _write_hosts_file(self, host: Host) -> None:
        """Maps this machine's name to the host's own address, and the names of all hosts to theirs.

        Horovod's contexts of process sets listen on what the machine's name resolves to, which in Debian's
        own file is 127.0.1.1: others could not reach it.
        """
        lines = ["127.0.0.1 localhost", f"{host.address} {socket.gethostname()}"]
        lines += [f"{other.address} {other.name}" for other in self.hosts]
        folder = namespaces.FILES / host.namespace
        folder.mkdir(parents=True)
        (folder / "hosts").write_text("\n".join(lines) + "\n")

    @staticmethod
    def _limit(namespace: str, interface: str, rate_bit_per_s: float) -> None:
        burst = max(MIN_BURST_BYTES, int(rate_bit_per_s / 8 * BURST_SECONDS))
        queue = min(max(MIN_QUEUE_BYTES, int(rate_bit_per_s / 8 * QUEUE_SECONDS)), MAX_QUEUE_BYTES)
        rate = [f"{rate_bit_per_s:.0f}bit", "burst", str(burst), "limit", str(queue)]
        namespaces.call(
            [
                "ip",
                "netns",
                "exec",
                namespace,
                "tc",
                "qdisc",
                "add",
                "dev",
                interface,
                "root",
                "tbf",
                "rate",
                *rate,
            ]
        )

    # Use

    def traffic(self) -> list[Traffic]:
        """By host, since the lab was set up."""
        found = []
        for host in self.hosts:
            text = namespaces.ip("-n", host.namespace, "-s", "-json", "link", "show", "dev", INTERFACE)
            counted = json.loads(text)[0]["stats64"]
            sent, received = counted["tx"], counted["rx"]
            found.append(Traffic(sent["bytes"], received["bytes"], sent["packets"], received["packets"]))
        return found

    def popen(self, host: Host, command: Sequence[str | Path], **options: Any) -> subprocess.Popen[Any]:
        """Starts a process on a host; options are subprocess.Popen's."""
        return subprocess.Popen(["ip", "netns", "exec", host.namespace, *map(str, command)], **options)

    def run(
        self,
        command: Sequence[str | Path],
        slots: int = 1,
        env: Mapping[str, str] | None = None,
        timeout: float = 300,
        show_rank_0: bool = False,
    ) -> Job:
        """Runs a Horovod job, `slots` workers on each host, by the variables that horovodrun would set.

        `env` is added to this process's environment. One failing worker ends the job, and so does `timeout`,
        in seconds. With `show_rank_0` its output goes to this process's own as it comes, not into the Job.
        """
        size = slots * len(self.hosts)
        with self._folder() as folder, contextlib.ExitStack() as stack:
            port = self._start_rendezvous(stack, slots)
            started = time.monotonic()
            workers = []
            for rank in range(size):
                settings = {**os.environ, **(env or {}), **self._worker_environment(rank, slots, port)}
                files = [stack.enter_context(Path(folder, f"{rank}.{end}").open("wb")) for end in ("out", "err")]
                stdout, stderr = (None, None) if show_rank_0 and rank == 0 else files
                host = self.hosts[rank // slots]
                workers += [self.popen(host, command, env=settings, stdout=stdout, stderr=stderr)]

            def one_failed() -> bool:
                return any(worker.poll() for worker in workers)

            def all_ended() -> bool:
                return all(worker.poll() is not None for worker in workers)

            ended_in_time = _wait_until(lambda: all_ended() or one_failed(), started + timeout)
            if ended_in_time:  # when one has failed, the others end soon too, and then say why
                _wait_until(all_ended, time.monotonic() + 3)
            self._end_processes()
            codes = [worker.wait() for worker in workers]
            return Job(
                returncode=next((code for code in codes if code), 0),
                seconds=time.monotonic() - started,
                stdout=_texts(folder, size, "out"),
                stderr=_texts(folder, size, "err"),
                problem=None if ended_in_time else f"not finished after {timeout:.0f} s; ended",
            )

    def horovodrun(
        self,
        command: Sequence[str | Path],
        slots: int = 1,
        env: Mapping[str, str] | None = None,
        timeout: float = 300,
        options: Sequence[str] = (),
        discovery: Path | None = None,
    ) -> Job:
        """Runs a job as a user would: horovodrun on the first host reaches the others over ssh.

        `options` are further ones of horovodrun; `discovery` is the script that makes it an elastic job, which then is
        to start on the hosts that the script names. The rest is as with `run`.
        """
        self._start_sshd()
        size = slots * len(self.hosts)
        hosts = ["-np", str(size), "-H", ",".join(f"{host.name}:{slots}" for host in self.hosts)]
        if discovery is not None:
            hosts = ["--host-discovery-script", str(discovery), "--network-interfaces", INTERFACE]
        with self._folder() as folder:
            # Every worker writes to files of its own: whole lines, nothing interleaved.
            # In an elastic job a rank may be given again.
            redirect = 'exec "$@" >>"$0/$HOROVOD_RANK.out" 2>>"$0/$HOROVOD_RANK.err"'
            # The cache remembers that ssh to a host worked, and the next lab's hosts have the same names.
            launcher = [sys.executable, "-m", "horovod.runner.launch", "--gloo", "--disable-cache"]
            launcher += [*hosts, *options, "sh", "-c", redirect, folder, *map(str, command)]
            started = time.monotonic()
            with Path(folder, "launcher").open("wb") as output:
                process = self.popen(
                    self.hosts[0],
                    launcher,
                    env={**os.environ, **(env or {}), **self._rate_environment()},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
                ended_in_time = _wait_until(lambda: process.poll() is not None, started + timeout)
                if not ended_in_time:
                    process.terminate()
                    _wait_until(lambda: process.poll() is not None, time.monotonic() + TERMINATE_SECONDS)
                self._end_processes()
                process.wait()
            return Job(
                returncode=process.returncode,
                seconds=time.monotonic() - started,
                stdout=_texts(folder, size, "out"),
                stderr=_texts(folder, size, "err"),
                launcher_output=Path(folder, "launcher").read_text(errors="replace"),
                problem=None if ended_in_time else f"not finished after {timeout:.0f} s; ended",
            )

    # Parts of the above

    def _folder(self) -> tempfile.TemporaryDirectory[str]:
        """Where the lab's other files are, so that the next lab finds it if this process is killed."""
        return tempfile.TemporaryDirectory(dir=namespaces.FILES / self._jobs)

    def _worker_environment(self, rank: int, slots: int, port: int) -> dict[str, str]:
        index, local_rank = divmod(rank, slots)
        return {
            "HOROVOD_HOSTNAME": self.hosts[index].name,
            "HOROVOD_RANK": str(rank),
            "HOROVOD_SIZE": str(slots * len(self.hosts)),
            "HOROVOD_LOCAL_RANK": str(local_rank),
            "HOROVOD_LOCAL_SIZE": str(slots),
            "HOROVOD_CROSS_RANK": str(index),
            "HOROVOD_CROSS_SIZE": str(len(self.hosts)),
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": self.hosts[0].address,
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
            "HOROVOD_GLOO_IFACE": INTERFACE,
            "NCCL_SOCKET_IFNAME": INTERFACE,
            "PYTHONUNBUFFERED": "1",
            **self._rate_environment(),
        }

    def _rate_environment(self) -> dict[str, str]:
        return {} if self.rate_bit_per_s is None else {RATE_VARIABLE: repr(float(self.rate_bit_per_s))}

    def _start_rendezvous(self, stack: contextlib.ExitStack, slots: int) -> int:
        """Horovod's own server, on the first host, until `stack` is closed. Returns its port."""
        hosts = ",".join(f"{host.name}:{slots}" for host in self.hosts)
        program = (
            "import sys\n"
            "from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts\n"
            "from horovod.runner.http.http_server import RendezvousServer\n"
            "server = RendezvousServer()\n"
            "port = server.start()\n"
            f"server.init(get_host_assignments(parse_hosts({hosts!r}), {slots * len(self.hosts)}))\n"
            "print(port, flush=True)\n"
            "sys.stdin.read()\n"
        )
        server = self.popen(
            self.hosts[0], [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        stack.enter_context(server)
        stack.callback(server.kill)
        assert server.stdout is not None
        line = server.stdout.readline()
        if not line:
            raise NetLabError(f"Horovod's rendezvous server did not start (exit status {server.wait()})")
        return int(line)

    def _start_sshd(self) -> None:
        """One sshd per host, with keys that only this lab knows."""
        if self._sshd:
            return
        reason = available(ssh=True)
        if reason:
            raise NetLabError(reason)
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # where sshd locks its unprivileged half in
        with self._folder() as keys:
            for key in ("user", "host"):
                namespaces.call(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", f"{keys}/{key}"])
            host_key = Path(keys, "host.pub").read_text()
            for host in self.hosts:
                folder = namespaces.FILES / host.namespace / "ssh"  # seen as /etc/ssh on the host
                shutil.copytree(keys, folder)
                folder.chmod(0o700)
                (folder / "known_hosts").write_text("".join(f"{h.name},{h.address} {host_key}" for h in self.hosts))
                (folder / "ssh_config").write_text(SSH_CONFIG)
                (folder / "sshd_config").write_text(SSHD_CONFIG.format(address=host.address))
                log = folder / "sshd.log"
                self._sshd += [self.popen(host, [SSHD, "-D", "-E", log], stdin=subprocess.DEVNULL)]
        deadline = time.monotonic() + 10
        for host, process in zip(self.hosts, self._sshd):

            def listening(host: Host = host, process: subprocess.Popen[bytes] = process) -> bool:
                logged = namespaces.FILES / host.namespace / "ssh" / "sshd.log"
                return process.poll() is not None or "Server listening" in namespaces.text_of(logged)

            if not _wait_until(listening, deadline) or process.poll() is not None:
                said = namespaces.text_of(namespaces.FILES / host.namespace / "ssh" / "sshd.log")
                raise NetLabError(f"sshd does not start on {host.name}: {said.strip()}")

    def _end_processes(self) -> None:
        """Ends all that runs on the hosts but the servers that stay."""
        stay = {process.pid for process in self._sshd}
        namespaces.kill([host.namespace for host in self.hosts], stay)


SSH_CONFIG = """\
Host *
  User root
  IdentityFile /etc/ssh/user
  IdentitiesOnly yes
  UserKnownHostsFile /etc/ssh/known_hosts
  LogLevel ERROR
"""

SSHD_CONFIG = """\
ListenAddress {address}
HostKey /etc/ssh/host
AuthorizedKeysFile /etc/ssh/user.pub
PermitRootLogin prohibit-password
PasswordAuthentication no
StrictModes no
UsePAM no
PidFile none
MaxStartups 100
"""


def _catch_sigterm(lab: NetLab) -> None:
    """Makes SIGTERM an exception, so that `with` blocks end as they should, where nothing else handles it."""
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    lab._handler = signal.signal(signal.SIGTERM, leave)


def _wait_until(done: Callable[[], bool], deadline: float) -> bool:
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _texts(folder: str, size: int, end: str) -> tuple[str, ...]:
    return tuple(namespaces.text_of(Path(folder, f"{rank}.{end}")) for rank in range(size))
