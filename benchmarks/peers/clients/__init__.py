"""The load: clients that cost less than what they measure, and when the tokens came.

| module | subject |
|---|---|
| load | streams and requests, and the times of their tokens |
| grpc_client | clients of Baton's routers, and of its workers without a router |
| http_client | a client of completions over HTTP/1.1 |
| long_prompts | clients of one long prompt at a time |
| steps | when the engines' steps were |
"""
