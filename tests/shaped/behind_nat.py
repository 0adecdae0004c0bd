"""Devices behind address translation, in network namespaces: a public network, and homes whose router masquerades.

Each home has the same private addresses, as homes do. Its router lets connections out, and forwards a port only if told
to. Needs root, iproute2 and iptables.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess

from peer.errors import LinkError
from peer.links.network import add_namespace, remove_namespace

HOME = "192.168.1"
PUBLIC = "10.78.0"
_serial = itertools.count()


def missing_tools() -> str | None:
    """Return the reason why this cannot be built here, in a sentence; None if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool, package in (("ip", "iproute2"), ("iptables", "iptables")):
        if shutil.which(tool) is None:
            return f"{tool} (package {package}) is not installed"
    name = f"sotto-nat-{os.getpid()}-probe"
    try:
        add_namespace(name)
        for command in (
            ("ip", "netns", "exec", name, "iptables", "-t", "nat", "-A", "POSTROUTING", "-j", "MASQUERADE"),
            ("ip", "netns", "exec", name, "iptables", "-A", "FORWARD", "-m", "conntrack", "--ctstate", "NEW"),
        ):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                return f"`{' '.join(command)}` fails here: {done.stderr.strip()}"
    except LinkError as error:
        return f"network namespaces cannot be made here: {error}"
    finally:
        remove_namespace(name)
    return None


class NatNetwork:
    """`num_public` machines with public addresses, and one machine in each of `num_homes` homes, until it is closed."""

    def __init__(self, *, num_public: int, num_homes: int) -> None:
        """Build it. Raises LinkError or CalledProcessError if the kernel refuses; nothing is left behind then."""
        self._prefix = f"sotto-nat-{os.getpid()}-{next(_serial)}"
        self._names: list[str] = []
        try:
            self._switch = self._namespace("net")
            self._ip(self._switch, "link", "add", "br0", "type", "bridge")
            self._ip(self._switch, "link", "set", "br0", "up")
            self.public = [self._machine(index) for index in range(num_public)]
            self.homes = [self._home(index) for index in range(num_homes)]
        except BaseException:
            self.close()
            raise

    def public_address(self, index: int) -> str:
        """Return the address of a public machine."""
        return f"{PUBLIC}.{index + 1}"

    def router_address(self, home: int) -> str:
        """Return the public address of a home, the source of all that leaves it."""
        return f"{PUBLIC}.{home + 101}"

    def command(self, namespace: str) -> list[str]:
        """Return the prefix of a command that is to run on a machine (one of `public` or `homes`)."""
        return ["ip", "netns", "exec", namespace]

    def forward_port(self, home: int, port: int) -> None:
        """Have the router of a home pass a TCP port on to the machine inside, as its owner would."""
        router = f"{self._prefix}-router{home}"
        rule = ("-p", "tcp", "--dport", str(port))
        target = f"{HOME}.2:{port}"
        self._in(router, "iptables", "-t", "nat", "-A", "PREROUTING", "-i", "out", *rule, "-j", "DNAT", "--to", target)
        self._in(router, "iptables", "-I", "FORWARD", "-i", "out", *rule, "-j", "ACCEPT")

    def limit_packets(self, home: int, mtu: int, *, tells: bool) -> None:
        """Have the router of a home let only packets of `mtu` bytes out, and say so or not (ICMP)."""
        router = f"{self._prefix}-router{home}"
        self._ip(router, "route", "change", f"{PUBLIC}.0/24", "dev", "out", "mtu", "lock", str(mtu))
        rule = ("OUTPUT", "-p", "icmp", "--icmp-type", "fragmentation-needed", "-j", "DROP")
        self._in(router, "iptables", *(("-D", *rule) if tells else ("-A", *rule)))

    def close(self) -> None:
        """Kill the processes that still run inside, and remove everything."""
        for name in reversed(self._names):
            remove_namespace(name)
        self._names.clear()

    def _machine(self, index: int) -> str:
        name = self._namespace(f"public{index}")
        self._plug_in(name, f"p{index}", "eth0", f"{self.public_address(index)}/24")
        return name

    def _home(self, index: int) -> str:
        router, inside = self._namespace(f"router{index}"), self._namespace(f"home{index}")
        self._plug_in(router, f"h{index}", "out", f"{self.router_address(index)}/24")
        self._ip(router, "link", "add", "in", "type", "veth", "peer", "name", "eth0", "netns", inside)
        self._address(router, "in", f"{HOME}.1/24")
        self._address(inside, "eth0", f"{HOME}.2/24")
        self._ip(inside, "route", "add", "default", "via", f"{HOME}.1")
        self._in(router, "sysctl", "-qw", "net.ipv4.ip_forward=1")
        self._in(router, "iptables", "-t", "nat", "-A", "POSTROUTING", "-o", "out", "-j", "MASQUERADE")
        asked_for = ("-m", "conntrack", "--ctstate", "ESTABLISHED,RELATED")
        for chain in ("FORWARD", "INPUT"):
            self._in(router, "iptables", "-A", chain, "-i", "out", *asked_for, "-j", "ACCEPT")
            self._in(router, "iptables", "-A", chain, "-i", "out", "-j", "DROP")
        return inside

    def _namespace(self, what: str) -> str:
        name = f"{self._prefix}-{what}"
        add_namespace(name)
        self._names.append(name)
        self._ip(name, "link", "set", "lo", "up")
        return name

    def _plug_in(self, namespace: str, port: str, interface: str, address: str) -> None:
        """Connect a namespace to the public network."""
        self._ip(self._switch, "link", "add", port, "type", "veth", "peer", "name", interface, "netns", namespace)
        self._ip(self._switch, "link", "set", port, "master", "br0")
        self._ip(self._switch, "link", "set", port, "up")
        self._address(namespace, interface, address)

    def _address(self, namespace: str, interface: str, address: str) -> None:
        self._ip(namespace, "addr", "add", address, "dev", interface)
        self._ip(namespace, "link", "set", interface, "up")

    def _ip(self, namespace: str, *arguments: str) -> None:
        subprocess.run(["ip", "-n", namespace, *arguments], capture_output=True, text=True, check=True)

    def _in(self, namespace: str, *command: str) -> None:
        subprocess.run([*self.command(namespace), *command], capture_output=True, text=True, check=True)
