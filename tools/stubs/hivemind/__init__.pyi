"""What the tools use of hivemind 1.1.12."""

from collections.abc import Iterable

class DHT:
    def __init__(
        self,
        initial_peers: Iterable[str] = ...,
        *,
        start: bool,
        host_maddrs: Iterable[str] = ...,
        auto_nat: bool = ...,
        nat_port_map: bool = ...,
        use_relay: bool = ...,
    ) -> None: ...
    def get_visible_maddrs(self) -> list[object]: ...
