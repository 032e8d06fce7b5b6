"""What setup.cfg cannot say: reproducible distributions."""

import sys

from setuptools import setup

sys.path.insert(0, ".")

from packing import COMMANDS

setup(cmdclass=COMMANDS)
