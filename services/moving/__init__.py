"""Running decodes that go on on another worker, with their KV.

running.py   the decodes of this worker, which yield or lend their KV; how many are to go elsewhere
warming.py   the warming of the prefix cache that an answer will move to
roles.py     a change of the worker's roles while it serves, never of a model's last worker of a role
"""
