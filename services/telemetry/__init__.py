"""A worker's metrics and timings.

metrics.py        the metrics of a worker; docs/metrics.md explains them
gpu.py            metrics of the GPUs, read from NVML at each scrape
timings.py        how long the stages of a call took
rank_health.py    the health and the metrics of a rank above 0
"""
