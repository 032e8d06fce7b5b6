"""Queries and keys before decode."""
