"""A peer in the process of a training script: the loop is the user's, the gossip is the daemon's.

The package `sottovoce` (`peer/library/api/sottovoce`) hands on what is public of this room. A script calls `join` and
then `step` after each of its gradient steps. Every so many steps the displacement of all parameters takes the place of
the gradient in a round, and the mixed model takes the place of the script's.

| part | module |
| --- | --- |
| what a script calls: `Peer`, `join` | `peer` |
| the configuration of a run whose loop is a script, and a script's place in it | `place` |
| how a script finds its place by itself, and how it trains alone; its share of the data | `here`, `shares` |
| a script as the main program of a process | `script` |
| which parameters are exchanged, and which models are refused | `parameters` |
| the states of optimizer, scheduler, loader and random numbers as arrays | `kept_state`, `random_state` |
| how the thread of the script and that of the daemon hand over to each other | `meeting` |
| the training side of the peer, as daemon and simulator see it | `loop_steps` |
| the thread of the daemon | `background` |
| all peers in one process | `simulation` |
"""
