"""Finds reasoning and tool calls in the text of an answer.

parts.py      what a text is made of; the Protocol of parsers, and the one for reasoning in <think> and </think>
blocks.py     parsers for calls between markers and for calls without, and for arguments while they are written
formats.py    how today's models write calls: Hermes and Qwen, Llama, Mistral, DeepSeek
tool_grammar.py  tool choice and strict tools as the grammar of an answer
registry.py   which format a model has, by its chat template; other distributions add formats

A parser never loses text: what does not parse comes as text.
"""
