"""Well-formed frames that say what no honest peer says: one file for each kind of lie."""
