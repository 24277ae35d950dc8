"""Hours' worth of traffic for our own HTTP/2, as fast as it goes, and whether anything of it is left: `make soak`.

cluster (the process under test, and what it holds), traffic (what clients do, rightly and wrongly), __main__ (rounds of
traffic, what is held after each, the verdict and its report).
"""
