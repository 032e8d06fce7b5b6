"""Programs for those who change the package: they write files of the tree, or read reports of tests."""
