"""Text: from prompts to ids, and from ids to text.

request_input.py  a request's texts: checks, and token ids
chat_input.py     its conversations: the same
tokenizer.py      a model's tokenizer, from the files in its card
chat_template.py  conversations rendered as one text
completion.py     Completion: the growing output of a request, and why it ends
detokenizer.py    ids to text, by whole characters
stop_strings.py   finds stop strings in growing text
encoding/         token ids of texts, sooner than the library where they are known to be equal
parsing/          finds reasoning and tool calls in text
grammar_check.py  checks the grammars of guided requests
served_model.py   ServedModel: a model's tokenizer, limits and capabilities
json_values.py    JSON that clients send, without numbers that no JSON holds
media_validation.py  checks the media of a request
token_messages.py  a vocabulary's texts, and tokens as messages have them
"""
