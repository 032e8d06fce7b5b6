"""Typed instructions to Python functions: calls inlined, blocks and live registers found, code generated."""
