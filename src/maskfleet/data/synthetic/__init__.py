"""Generated images of shapes for the demo, the tests and the benchmarks."""
