"""Responses of /v1/responses that are kept: in the background, for retrieval, and as what later ones go on from.

document.py   one response as it comes, and its events after any number; its text, which is read from any place on
table.py      all kept responses of a router: whose they are, and what they may take
service.py    what the endpoints do with them: run, find, cancel, delete, go on from
endpoints.py  the routes under /v1/responses/{id}
"""
