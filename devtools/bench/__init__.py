"""`baton bench`: load for a running cluster, and what came of it.

traces.py    traces in Mooncake's format: read from a file, or generated
workload.py  requests from lengths or from a trace: when each is sent, and its prompt
load.py      sends requests at their times, or so many at once, and measures each answer
profile.py   measures the speed of an idle cluster, point by point
summary.py   percentiles, goodput, hit rate and balance of the answers
report.py    the summaries as Markdown, JSON and a plot
"""
