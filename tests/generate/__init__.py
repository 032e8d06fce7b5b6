"""Files that repeat what other files say: written by `python -m tests.generate`, compared by a test."""

from tests.generate import lists, params

#: What is written, by file: functions from a checkout's root to the texts that its files should have.
MAKERS = (
    params.make,
    params.constants,
    lists.kernel_lists,
    lists.operation_lists,
    lists.bench_lists,
    lists.setup_lists,
)
