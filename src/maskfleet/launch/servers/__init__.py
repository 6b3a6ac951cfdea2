"""Servers that run on this machine while a command does."""
