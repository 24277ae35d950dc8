"""The source of a media item's content.

uri.py          the strict syntax of URIs, and `data:` URIs
files.py        `file:` URIs, below allowed folders
https.py        `https:` URIs: the connection, and redirects
exchange.py     one GET over an open connection
addresses.py    which addresses of a host are public; which hosts a configuration allows
"""
