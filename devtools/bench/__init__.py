"""`baton bench`: load for a running server, and what came of it.

traces.py         traces in Mooncake's format: read from a file, or generated
agents.py         sessions of agents and chats, in a closed loop or as a trace
workload.py       requests from lengths or from a trace: when each is sent, its prompt and its images
openai_server.py  any server of OpenAI's API over HTTP
load.py           sends requests at a rate, or so many at once, and measures each answer
servers.py        the servers that a load is sent to: Baton by gRPC, and what all have in common
profile.py        measures the speed of an idle cluster, point by point
report.py         the summaries as Markdown, JSON and a plot; percentiles, goodput, hit rate and balance of the answers
comparison.py     several servers in one run, with their ratios
"""
