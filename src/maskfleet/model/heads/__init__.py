"""Heads that classify each region, refine its box and draw its mask: those of a feature pyramid and those of C4."""
