"""`python -m shardmesh doctor`: what is wrong with a machine or a job before it runs, and what to do about it.

    facts.py       what is so, as plain data       devices.py, network.py, system.py read it
    checks.py      what that means                 pure functions of the facts, one a check
    bandwidth.py   what collectives do             on the ranks of a job, or on local processes made for it
    report.py      both, for people and as JSON
"""
