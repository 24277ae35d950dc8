"""Baton's router beside other projects' routers: `make bench-router`.

| module | subject |
|---|---|
| environments | installs the peers from PyPI, into an environment of their own |
| engine | the workers of peers: an HTTP engine whose answers are ready-made |
| routers | what is started for each candidate |
| http_load | a client of completions over HTTP that costs little |
| compare | the loads, alternated; a table and a plot |
| plot | the bars, as SVG |
"""
