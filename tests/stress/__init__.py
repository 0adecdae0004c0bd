"""Everything that can go wrong, many times over: faults, kills, fuzzing, attacks, long runs.

`chaos` runs the fault simulator (`faults`) over many seeds, `kills` kills real peers, `soak` watches them for leaks,
`attack` attacks them, `fuzz` feeds the decoder with made-up bytes: `python -m tests.stress.chaos --help` and so on.
Each runs for minutes; the tests here run most of them for a short while.
"""
