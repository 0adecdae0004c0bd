"""Names of the gRPC services between peers, as `proto/sottovoce/v1` defines them."""

from __future__ import annotations

from peer.proto.sottovoce.v1 import control_pb2, exchange_pb2, relay_pb2

PEER_SERVICE = exchange_pb2.DESCRIPTOR.services_by_name["Peer"].full_name
CONTROL_SERVICE = control_pb2.DESCRIPTOR.services_by_name["Control"].full_name
RELAY_SERVICE = relay_pb2.DESCRIPTOR.services_by_name["Relay"].full_name
OWN_SOCKET = "control.sock"
"""File in the state folder at which callers on the same machine reach a peer."""
