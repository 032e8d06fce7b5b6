"""Files that repeat what other files say: written by `python -m tools.generate`, compared by a test."""

from tools.generate import bindings, lists, params

#: Generated files: functions from a checkout's root to the texts that its files should have.
LISTS = (
    params.make,
    params.constants,
    lists.kernel_lists,
    lists.operation_lists,
    lists.bench_lists,
)
#: Makers that import the package, to be run once the lists are right.
MADE_OF_RECORDS = (bindings.make,)
