"""The fuzzer of meaning and state: what becomes of peers when one of them says what it should not.

`lies` makes well-formed messages with hostile content, `trial` tells them to production peers (`worlds`) of every
algorithm (`circumstances`) and judges what comes of it, `handlers` does the same with what enters the daemon beside
frames. `tests.stress.fuzz_meaning` is the command.
"""
