"""Requests for pictures.

pipeline.py   the life of a request: validate, admit, draw; ImageService, for clients
options.py    checks of what is asked for, by the model's rules
calls.py      its call to a worker with the role diffuse, and to another one for what is not drawn yet
"""
