"""Zip and tar archives: as sources of a staging, and tar shards as what it makes."""
