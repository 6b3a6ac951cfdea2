"""Download public data sets: archives are unpacked while they arrive."""
