"""Communication between peers: admission, the connection in use to each neighbour, and the traffic over it.

- `transport` is the daemon's interface, with `handler` for its callbacks and `neighbor` for the peers it connects to.
- Opening a stream: `listener` and `dialler` exchange hellos (`handshake`, `hello`), `admission` says who may speak, and
  `links` keeps one connection to each neighbour in use.
- A `connection` turns bytes into typed values in its `inbox`, which blames the neighbour for any fault in them, and
  packs its output in its `outbox`: frames in `chunks` under credit, `receipts`, notes. `envelope` is the protobuf
  around them. `liveness` says when a neighbour is gone; `counters`, `socket_meter` and `tcp_info` measure the cost.
- Beside the streams: `control` calls, the `relay` with the `tunnels` through it, the `revocation_watch`.
- Identities: `security`. All of gRPC: `rpc`.
"""
