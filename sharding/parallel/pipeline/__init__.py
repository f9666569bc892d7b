"""Pipeline schedules as data: tables that are printed, proved and simulated before anything runs.

Read `actions`, `order`, `proof`, `event`, `chart`, `timeline`, `simulation`, `communication`,
`torch_csv`, `schedule`, `repeated_block`, `makers` and `make_schedule`, in this order. What runs is
in `split_backward` and `deferral`: the backward of a stage in two parts.
"""
