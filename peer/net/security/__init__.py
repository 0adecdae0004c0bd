"""The identity of a peer, and its proof.

A run has a certificate authority of its own (`authority`). Each peer holds a certificate made out to its name in
`[[peers]]` (`certificates`) and shows it in both directions: mutual TLS. An operator's certificate may query and stop
peers but cannot take part as one. A device asks for its certificate with a request (`requests`), and a certificate can
be revoked (`revocation_list`). Being certified is not enough to be admitted: the list of peers counts too.

`credentials` loads what a peer connects with: certificates, or a token where something on the way ends TLS.

TLS tells a listener whose certificate the caller holds. gRPC's Python API does not tell a dialler whose certificate the
listener holds, only that its name was right. The listener therefore proves it once more in its hello (`proofs`).

Keys are ECDSA on P-256, because gRPC's TLS library accepts no Ed25519 certificates. Names are checked, addresses are
not: a device keeps its identity when it moves.
"""
