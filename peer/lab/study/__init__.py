"""The bandwidth study: the same job under named links, algorithm by algorithm, measured and predicted.

`study` reads the file that describes a study, `cell` runs one cell of it with real peers, `rival_cell` with a program
of somebody else, `predict` on virtual links; `folder` keeps the measurements and runs the missing cells, `tables` puts
the cells together. `sotto lab study` is the command; the studies that come with the package are in `files`.
"""
