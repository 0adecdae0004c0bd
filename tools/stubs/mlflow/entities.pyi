# The part of MLflow that is used, so that types are checked where it is not installed.

class Metric:
    def __init__(self, key: str, value: float, timestamp: int, step: int) -> None: ...

class Param:
    def __init__(self, key: str, value: str) -> None: ...

class RunInfo:
    run_id: str

class Run:
    info: RunInfo

class Experiment:
    experiment_id: str
