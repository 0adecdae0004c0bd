# The part of wandb that is used, so that types are checked where it is not installed.

from collections.abc import Mapping

from wandb.sdk.wandb_run import Run

class Settings:
    def __init__(
        self, *, silent: bool, console: str, x_disable_stats: bool, x_disable_meta: bool, save_code: bool
    ) -> None: ...

def init(*, project: str, name: str, dir: str, mode: str, config: Mapping[str, str], settings: Settings) -> Run: ...
