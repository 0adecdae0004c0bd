from pathlib import Path

from pyarrow import Table

def write_table(table: Table, where: Path) -> None: ...
