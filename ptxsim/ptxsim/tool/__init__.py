"""The command line's parts: arguments, mutants, timelines, surveys, compiling."""
