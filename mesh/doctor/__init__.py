"""The command `python -m shardmesh doctor`.

Find what is wrong with a machine or a job before it runs, and how to fix it.

facts.py       read the host, as plain data    by devices.py, network.py, system.py
checks.py      judge the facts                 pure functions, one per check
bandwidth.py   try collectives                 on the ranks of a job, or on local processes
report.py      print both, or as JSON
"""
