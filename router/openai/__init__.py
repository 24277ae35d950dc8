"""OpenAI's API over HTTP, in the router's process: the same pipeline as gRPC, by another way in.

server.py       uvicorn on the router's event loop, from its start to the end of its drain
app.py          routes and endpoints; what surrounds each call: log line, trace, authentication, errors
exchange.py     what a call does whatever its API is: a body becomes a request, and its answer is written
call.py         one HTTP call: headers, the body within its limits, the connection that may go
json_body.py    parses a body whose number of values is bounded
errors.py       Baton's errors in OpenAI's shape, with the HTTP status
fields.py       fields that the endpoints share: sampling, stopping
messages.py     conversations, images, tools
chat.py         /v1/chat/completions; completions.py and responses.py are the other two ways to generate
embeddings.py   /v1/embeddings and /v1/models
resumable/      streams that go on after `Last-Event-ID`
stored/         responses that are kept: in the background, and as what later ones go on from
choices.py      answers as choices: whole, or streamed as server-sent events

Needs the extra `openai` (uvicorn); only server.py imports it.
"""
