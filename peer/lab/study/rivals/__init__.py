"""Programs of others that a bandwidth study runs beside ours: each worker is a process in a namespace of its own.

`worker` is all that a program needs of this package: its orders, a common start and end, and the clock. It imports
nothing else of `peer`, for a program may run with libraries of its own. `torch_program` is one that needs only torch.
"""
