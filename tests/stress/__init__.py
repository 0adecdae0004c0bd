"""Everything that can go wrong, many times over: faults, kills, fuzzing, attacks, long runs.

`chaos` runs the fault simulator (`faults`) over many seeds, `kills` kills real peers, `soak` watches them for leaks,
`attack` attacks them, `fuzz` feeds the decoder with made-up bytes, `fuzz_meaning` tells them well-formed lies:
`python -m tests.stress.chaos --help` and so on. `fuzz` and `fuzz_meaning_guided` have the form that OSS-Fuzz takes.
Each runs for minutes; the tests here run most of them for a short while.
"""
