"""One supervisor per host: keeps torchrun or mpirun alive and notices lost hosts."""
