"""The kinds of stacks: one file for the settings of each."""
