"""Requests for pictures and clips.

service.py    ImageService and VideoService, for clients
pipeline.py   the life of a request: validate, admit, draw
options.py    checks of what is asked for, by the model's rules
calls.py      its call to a worker with the role diffuse, and to another one for what is not drawn yet
"""
