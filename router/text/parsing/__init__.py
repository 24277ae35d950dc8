"""Finds reasoning and tool calls in the text of an answer.

parts.py      what a text is made of: Text, Reasoning, ToolCall; the Protocol of parsers
arguments.py  the arguments of a call while they are written
blocks.py     a parser for calls between markers, and one for calls without
reasoning.py  separates what stands between <think> and </think>
formats.py    how today's models write calls: Hermes and Qwen, Llama, Mistral, DeepSeek
tool_grammar.py  tool choice and strict tools as the grammar of an answer
registry.py   which format a model has, by its chat template; other distributions add formats

A parser never loses text: what does not parse comes as text.
"""
