"""Simulate two hosts on one machine by two network namespaces with one address each, joined by a veth pair."""

import ctypes
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

NEW_MOUNTS, NETWORK = 0x20000, 0x40000000  # CLONE_NEWNS and CLONE_NEWNET of Linux


@dataclass(frozen=True)
class Host:
    """A network namespace: its only interface besides loopback, the address of this interface, and its /etc/hosts."""

    namespace: str
    interface: str
    address: str
    names: Path

    def enter(self) -> None:
        """Move this process, which must have one thread, to this host.

        No name server can be reached, and name look-ups would wait for minutes, so the names come from /etc/hosts.
        """
        library = ctypes.CDLL(None, use_errno=True)
        with open(f"/run/netns/{self.namespace}") as namespace:
            for status in (library.setns(namespace.fileno(), NETWORK), library.unshare(NEW_MOUNTS)):
                if status:
                    raise OSError(ctypes.get_errno(), f"this process cannot enter {self.namespace}")
        subprocess.run(["mount", "--make-rslave", "/"], check=True)  # the mount below is for this process only
        subprocess.run(["mount", "--bind", self.names, "/etc/hosts"], check=True)


def unavailable_reason() -> str | None:
    """Return why this machine cannot make network namespaces, or None if it can."""
    if shutil.which("ip") is None:
        return "the command ip (iproute2), which makes network namespaces, is not installed"
    name = f"zerochat-try-{os.getpid()}"
    result = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if result.returncode:
        return f"network namespaces cannot be made: {result.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=False)
    return None


@contextmanager
def two_hosts(folder: Path) -> Iterator[tuple[Host, Host]]:
    """Create two hosts that reach only each other, and remove them at the end. `folder` holds their /etc/hosts."""
    first, second = hosts = _host(folder, 1), _host(folder, 2)
    try:
        for host in hosts:
            _ip("netns", "add", host.namespace)
        _ip("link", "add", first.interface, "netns", first.namespace, "type", "veth",
            "peer", "name", second.interface, "netns", second.namespace)  # fmt: skip
        for host in hosts:
            _ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", host.interface)
            for interface in ("lo", host.interface):
                _ip("-n", host.namespace, "link", "set", interface, "up")
        yield first, second
    finally:
        for host in hosts:  # the veth pair disappears with either namespace
            subprocess.run(["ip", "netns", "del", host.namespace], capture_output=True, check=False)


def disconnect(host: Host) -> None:
    """Take the network interface of a host down. As with a pulled cable, no process is notified."""
    _ip("-n", host.namespace, "link", "set", host.interface, "down")


def _host(folder: Path, number: int) -> Host:
    mark, address, names = os.getpid(), f"10.77.0.{number}", folder / f"hosts-{number}"
    # A host's own name is 127.0.1.1, as the installer of Debian writes it: other hosts cannot reach this address.
    names.write_text(f"127.0.0.1 localhost\n127.0.1.1 {socket.gethostname()}\n10.77.0.1 one\n10.77.0.2 two\n")
    return Host(f"zerochat-{mark}-{number}", f"veth{mark}.{number}", address, names)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
