"""What the authors measure and generate with; `python -m tools.NAME --help` explains each."""
