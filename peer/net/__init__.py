"""What passes between peers: who is let in, which connection is in use, and what goes over it.

- `transport` is what the daemon uses, with `handler` for what it is told and `neighbor` for whom it connects.
- Opening a stream: `listener` and `dialler` exchange hellos (`handshake`, `hello`), `admission` says who may speak, and
  `links` keeps one connection to each neighbour in use.
- A `connection` turns bytes into typed values in its `inbox`, which blames the neighbour for whatever is wrong with
  them, and packs what leaves in its `outbox`: frames in `chunks` under credit, `receipts`, notes. `envelope` is the
  protobuf around them. `liveness` says when a neighbour is gone; `counters`, `socket_meter` and `tcp_info` say what it
  all cost.
- Beside the streams: `control` calls, the `relay` with the `tunnels` through it, the `revocation_watch`.
- Who a peer is: `security`. All of gRPC: `rpc`.
"""
