"""Anthropic's API over HTTP, beside OpenAI's: the same listener, pipeline and limits.

endpoints.py     /v1/messages, its count of tokens, and the models in its form
messages.py      the body: system, messages, sampling, thinking, output format; tools, and the choice of them
content.py       blocks of content, the conversation that they make, and cache_control: what of it to retain
answers.py       answers as messages: whole, or streamed as events
errors.py        Baton's errors in Anthropic's shape, with the HTTP status

What both APIs share is in router/openai: the server, calls, bodies and their limits.
"""
