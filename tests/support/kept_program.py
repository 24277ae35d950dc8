"""A worker as its keeper sees it: does in each of its starts what the words for that start say, and notes it.

`python -m support.kept_program FILE WORDS WORDS ...`, where WORDS are such as `put:kv:first+die:SIGKILL`. Later starts
do what the last words say. Each line of FILE is the start's number and what was found.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from services.keeper.client import KeeperClient
from services.keeper.fork_server import keep_imports
from services.keeper.messages import VARIABLE

_FOREVER = 1000.0
_BEAT_COSTS = 0.05  # seconds of a processor


def main() -> None:
    """Does what is said for this start."""
    file, *starts = sys.argv[1:]
    keeper = KeeperClient.of_this_process()
    assert keeper is not None
    keeper, forked = _with_imports(keeper, starts[0])
    number = keeper.start.starts
    note = Path(file).open("a", buffering=1)  # noqa: SIM115
    note.write(f"{number} started by {keeper.start.ended_by or 'nothing'} as {os.getpid()}\n")
    if forked:
        note.write(f"{number} {forked}\n")
    for word in starts[min(number, len(starts) - 1)].split("+"):
        verb, *arguments = word.split(":")
        while verb == "until" and arguments[0] not in Path(file).read_text():
            time.sleep(0.01)
        if said := _obey(keeper, verb, arguments):
            note.write(f"{number} {said}\n")


def _with_imports(keeper: KeeperClient, words: str) -> tuple[KeeperClient, str]:
    """Leaves a fork server if the words begin so. Returns the keeper, and in a forked process what it is."""
    if not words.startswith("imports"):
        return keeper, ""
    if words.startswith("imports_with_threads"):
        threading.Thread(target=time.sleep, args=(_FOREVER,), daemon=True).start()
    before = os.getpid()
    keeper = keep_imports(keeper)
    if os.getpid() == before:
        return keeper, ""
    name = Path("/proc/self/comm").read_text().strip()
    return keeper, f"forked, parent {os.getppid()}, session {os.getsid(0)}, name {name}"


def _obey(keeper: KeeperClient, verb: str, arguments: list[str]) -> str:
    match verb, arguments:
        case "imports" | "imports_with_threads", []:  # it has left a fork server before
            return ""
        case "open", []:
            return f"has {sum(_is_socket(each) for each in os.listdir('/proc/self/fd'))} sockets"
        case "put", [name, fingerprint]:
            descriptor = os.memfd_create(name)
            os.write(descriptor, f"{name} of {fingerprint}".encode())
            keeper.put(name, fingerprint, [descriptor])
        case "get", [name, fingerprint]:
            kept = keeper.get(name, fingerprint)
            found = [os.pread(each, 100, 0).decode() for each in kept.descriptors]
            return f"found {name} {found} stale {kept.stale!r}"
        case "drop", [name]:
            keeper.drop(name)
        case "upgrade", []:
            return f"upgrade: {keeper.upgrade() or 'ready'}"
        case "stand_by", []:
            keeper.stand_by()
        case "hang_upgrade", []:
            threading.Thread(target=keeper.upgrade, daemon=True).start()
            time.sleep(_FOREVER)
        case "start", [seconds]:
            keeper.begin(float(seconds))
        case "watch", [seconds]:
            keeper.watch(float(seconds))
        case "beat", [times]:
            for _ in range(int(times)):
                keeper.beat()
                time.sleep(0.1)
        case "until", [_]:
            time.sleep(0.3)  # for the keeper to have heard what comes next there
        case "starve", [seconds]:
            return _starve(keeper, float(seconds))
        case "spin", []:
            while True:
                pass
        case "inherited", []:
            inherited = [int(each) for each in os.listdir("/proc/self/fd") if _is_inheritable(int(each))]
            return f"inherited {sorted(inherited)} and {os.environ.get(VARIABLE, 'no number')}"
        case "started", []:
            return f"started again by {keeper.start.ended_by}"
        case "lost", []:
            return f"lived for {_age():.3f}, lost for {keeper.seconds_since_loss():.3f}"
        case "wait", []:
            time.sleep(_FOREVER)
        case "stop", []:
            os.kill(os.getpid(), signal.SIGSTOP)
        case "hold", []:
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        case "held", []:
            signal.sigwait([signal.SIGTERM])
        case "ignore", []:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        case "die", [name]:
            os.kill(os.getpid(), int(name) if name.isdecimal() else signal.Signals[name])
        case "exit", [code]:
            os._exit(int(code))
        case _:
            raise AssertionError(f"{verb} {arguments}")
    return ""


def _starve(keeper: KeeperClient, seconds: float) -> str:
    """Beats whenever a little is computed, on a processor that others need for so long; says how long that took."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    spin = f"import time; ends_at = time.monotonic() + {seconds}\nwhile time.monotonic() < ends_at: pass"
    others = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(3)]
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    longest, last = 0.0, time.monotonic()
    while any(other.poll() is None for other in others):
        computed_until = time.process_time() + _BEAT_COSTS
        while time.process_time() < computed_until:
            pass
        keeper.beat()
        longest, last = max(longest, time.monotonic() - last), time.monotonic()
    return f"beat after {longest:.1f} at the latest"


def _is_inheritable(descriptor: int) -> bool:
    try:
        return os.get_inheritable(descriptor)
    except OSError:
        return False  # that of the listing


def _is_socket(descriptor: str) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:")
    except OSError:
        return False  # that of the listing


def _age() -> float:
    """The seconds since this process was started."""
    began = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
