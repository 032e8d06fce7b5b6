"""Core of every benchmark: timing, running a case, records, tables, plots. It knows no operation and no peer."""
