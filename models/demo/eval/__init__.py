"""The demonstration model in EleutherAI's lm-eval: `make eval`.

exercises.py        the questions of the tasks, drawn from the model's own families of exercises
demo_*.yaml         the tasks, for `lm-eval run --include_path models/demo/eval`
clusters.py         local clusters that are evaluated, also while their workers are killed
harness.py          runs lm-eval, and reads its answers
run.py              all ways to the same answers, and whether they are the same
"""
