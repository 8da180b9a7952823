"""Free TCP ports on the loopback interface, and whose a listening port is."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from ipaddress import ip_address

import psutil

from registry.errors import InfrastructureError


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens on now. It may be taken before it is used: be ready to retry."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """As `free_port`, several that differ: a process may take long until it listens on its own."""
    with ExitStack() as held:
        probes = [
            held.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            for _ in range(count)
        ]
        for probe in probes:
            probe.bind((host, 0))
        return [probe.getsockname()[1] for probe in probes]


def listens(pid: int, port: int) -> bool:
    """Whether process `pid` or a child of it listens on `port`.

    A stranger's server on the same port would answer a health check too; this tells them apart.
    Raises `InfrastructureError` where it listens for other machines too: nothing of ours was told
    to, and a firewall may be all that is left then.
    """
    try:
        front = psutil.Process(pid)
        family = [front, *front.children(recursive=True)]
    except psutil.NoSuchProcess:
        return False
    for process in family:
        try:
            connections = process.net_connections(kind="tcp")
        except psutil.Error:
            continue
        for one in connections:
            if one.status == psutil.CONN_LISTEN and one.laddr.port == port:
                if not ip_address(one.laddr.ip).is_loopback:
                    raise InfrastructureError(
                        f"process {process.pid} listens on {one.laddr.ip}:{port}, open to other "
                        "machines: it was told 127.0.0.1"
                    )
                return True
    return False


def listener(port: int) -> str:
    """Who listens on `port`, for a person: process id and command. Empty: not to be seen."""
    for process in psutil.process_iter():
        try:
            connections = process.net_connections(kind="tcp")
            if any(c.status == psutil.CONN_LISTEN and c.laddr.port == port for c in connections):
                return f"process {process.pid} ({' '.join(process.cmdline())[:100]})"
        except psutil.Error:
            continue
    return ""
