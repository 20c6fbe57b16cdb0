"""One module per claim: a table for people, `--json` for one object on the last line, evidence to recompute it from."""
