"""A trace viewer without further dependencies: OTLP receiver, bounded store, Jaeger's query API, and a page.

store.py     keeps the newest traces in bounded memory; finds traces
api.py       answers each path: Jaeger's query API and the page; the OTLP receiver, and all parts together
http.py      a small HTTP/1.1 server
page.html    the page
reading.py   reads a trace from such an API; Jaeger's JSON
contract.py  checks a trace against the contract in docs/tracing.md
"""
