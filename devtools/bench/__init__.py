"""`baton bench`: load for a running server, and what came of it.

traces.py         traces in Mooncake's format: read from a file, or generated
agents.py         sessions of agents and chats, in a closed loop or as a trace
workload.py       requests from lengths or from a trace: when each is sent, its prompt and its images
server.py         what a load is sent to; Baton by gRPC
openai_server.py  any server of OpenAI's API over HTTP
load.py           sends requests at their times, or so many at once, and measures each answer
steps.py          the rates and concurrencies of a sweep
profile.py        measures the speed of an idle cluster, point by point
summary.py        percentiles, goodput, hit rate and balance of the answers
report.py         the summaries as Markdown, JSON and a plot
comparison.py     several servers in one run, with their ratios
"""
