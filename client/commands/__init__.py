"""One module a command; each has `async def run(arguments) -> int`, the exit code."""
