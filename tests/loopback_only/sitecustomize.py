"""Refuses every socket but loopback. Python imports a module of this name by itself when its folder is on PYTHONPATH,
so that the processes which tests start are held by it too; conftest.py calls it for the tests' own process."""

import ipaddress
import socket
from typing import Any

_LOCAL_NAMES = ("localhost", "ip6-localhost", "", None)


class NetworkRefused(OSError):
    """A test tried to reach another machine."""


def _is_loopback(host: Any) -> bool:
    if isinstance(host, bytes):
        host = host.decode()
    if host in _LOCAL_NAMES or host == socket.gethostname():
        return True
    try:
        return ipaddress.ip_address(str(host).partition("%")[0]).is_loopback or str(host) in ("0.0.0.0", "::")
    except ValueError:
        return False


def _require_loopback(family: int, address: Any) -> None:
    if family in (socket.AF_INET, socket.AF_INET6) and not _is_loopback(address[0]):
        raise NetworkRefused(f"tests reach no other machine, but {address} was asked for")


def refuse_all_but_loopback() -> None:
    """Replaces connect, connect_ex, sendto and name look-up of every socket made from now on. Twice is once."""
    if getattr(socket.socket, "loopback_only", False):
        return
    plain = socket.socket

    class LoopbackSocket(plain):  # type: ignore[misc, valid-type]
        loopback_only = True

        def connect(self, address: Any) -> None:
            _require_loopback(self.family, address)
            super().connect(address)

        def connect_ex(self, address: Any) -> int:
            _require_loopback(self.family, address)
            return super().connect_ex(address)

        def sendto(self, data: Any, *rest: Any) -> int:
            _require_loopback(self.family, rest[-1])
            return super().sendto(data, *rest)

    look_up = socket.getaddrinfo

    def getaddrinfo(host: Any, *rest: Any, **options: Any) -> Any:
        if not _is_loopback(host):
            raise NetworkRefused(f"tests reach no other machine, but {host!r} was looked up")
        return look_up(host, *rest, **options)

    socket.socket = LoopbackSocket  # type: ignore[misc]
    socket.getaddrinfo = getaddrinfo


refuse_all_but_loopback()
