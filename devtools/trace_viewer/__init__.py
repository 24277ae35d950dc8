"""A trace viewer without further dependencies: OTLP receiver, bounded store, Jaeger's query API, and a page.

viewer.py    the OTLP receiver, and all parts together
store.py     keeps the newest traces in bounded memory
search.py    finds traces
api.py       answers each path: Jaeger's query API and the page
jaeger.py    Jaeger's JSON
http.py      a small HTTP/1.1 server
page.html    the page
reading.py   reads a trace from such an API
contract.py  checks a trace against the contract in docs/tracing.md
"""
