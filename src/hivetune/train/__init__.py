"""Training: from a config and its rows to a run that is done, or to a plain reason why not.

Read it in this order:

    start.py                   open_run      the run folder of a config: its data, model and plan
    plan/run.py                plan_run      what a config needs in memory, time and disk, without a run
    start.py                   train_run     trains under the supervisor and accounts for each row
    supervise/supervisor.py    supervise_run starts workers, explains their deaths, tries one change at a time
    worker/loop.py             main          the loop, in a process of its own

Only `worker/` imports torch, and nobody imports `worker/`: the supervisor starts it as a child process.
"""
