"""AD-PSGD and its Moniqua form: no rounds, pairs of peers that average when it suits them.

    read:  z ← x, and the gradient is computed at z
    mix:   x_i, x_j ← (x_i + x_j)/2, atomically for the pair
    step:  x ← x − γ g(z)

`node` is one peer's side, without sockets or clock. It joins the `initiator` of own exchanges and the `responder` to
those of others, which mix into one `model`; their unfinished exchanges are in `open_exchanges`. `judge` refuses
messages that no honest peer sends, `coding` is where the algorithms (`ad_psgd`, `moniqua_ad_psgd`) differ, `events` is
the log.

Rules by which a pair stays atomic without locks:

- A peer is in one exchange at a time, as initiator or responder. The responder averages in the moment in which it
  answers. A busy peer says so at once, and the initiator tries again later, with another neighbour if there is one. No
  peer waits while it holds something that another one waits for, so that no graph can deadlock.
- Both add ½ (x̂_other − x̂_own **as sent**), so that a gradient step between request and reply commutes with the mix.
  Only a read after such a step has to wait (`can_read`): the model that it saw would fit no serial order.
- When two requests cross, the lower peer's wins: the higher peer answers it, while the lower peer, which is waiting
  itself, refuses the other.
- Every exchange number has one result for ever. A repeated request (after a disconnect or a crash) gets the same reply,
  applied once. A refusal is final, and the initiator tries again under a new number.
"""
