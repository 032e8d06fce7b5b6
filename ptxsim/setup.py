"""What setup.cfg cannot say: how the package is packed."""

import sys

from setuptools import setup

sys.path.insert(0, ".")

from packing import COMMANDS

setup(cmdclass=COMMANDS)
