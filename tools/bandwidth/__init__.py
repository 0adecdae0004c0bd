"""The bandwidth study: the same job under named links, algorithm by algorithm, measured and predicted.

`plan` reads the file that describes a study, `cell` runs one cell of it with real peers, `rivals` with what others have
built, `predict` on virtual links; `tables` puts the cells together. `tools/bandwidth_study.py` is the command.
"""
