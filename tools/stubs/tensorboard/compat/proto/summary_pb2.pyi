from collections.abc import Sequence

class Summary:
    class Value:
        def __init__(self, *, tag: str, simple_value: float) -> None: ...

    def __init__(self, *, value: Sequence[Value]) -> None: ...
