"""Run folders: how they are made, named, found, described and continued. Standard library and yaml only, so that a
wrong name is answered before torch is imported. Import its modules directly; those of one file are called after it.

    runs/20260131-142530-3fa9c1/          or runs/<name>
        config.yaml      the resolved settings, plain
        versions.json    python, packages, commit
        status.json      {"state": "running" | "finished" | "failed" | "interrupted", "step", "steps", "error"}
        metrics.jsonl    one row per optimizer step and per validation, and per attention head at validations
        samples.txt  summary.json  checkpoints/{last,best,step-00001000}.ckpt
"""
